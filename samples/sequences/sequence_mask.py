import torch
from torch import Tensor

from opgrip.samples.sample import sample


@sample(
    lambda draw, sequences, longest, max_len=None: (draw.integers(sequences, low=1, high=longest + 1), max_len),
    {
        "OpenNMT Transformer, training, 64 sentences": (64, 100),
        "OpenNMT Transformer, training, 4096 tokens, length given": (160, 50, 50),
    },
    tags="IfElseBranch InputAware DataDependentShape Reduce Broadcast ViewAttribute",
    url="https://github.com/OpenNMT/OpenNMT-py/blob/c8081afa3fab4e169c34a84f9304cf37184f97d7/onmt/utils/misc.py#L56",
)
def sequence_mask(lengths: Tensor, max_len: int | None = None) -> Tensor:
    """Return a mask that is True for the tokens of each sequence.

    Parameters
    ----------
    lengths : (N,) int
    max_len : number of columns; None for the greatest length

    Returns (N, max_len) bool
    Source: OpenNMT-py, `misc.sequence_mask`.
    """
    if max_len is None:
        max_len = int(lengths.max())
    places = torch.arange(max_len, dtype=lengths.dtype, device=lengths.device)
    return places < lengths[:, None]
