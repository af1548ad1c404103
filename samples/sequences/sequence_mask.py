import torch
from torch import Tensor

from opgrip.samples.sample import Draw, sample


def inputs(draw: Draw, sequences: int, longest: int, max_len: int | None = None) -> tuple[Tensor, int | None]:
    """Return the lengths of a batch."""
    return draw.integers(sequences, low=1, high=longest + 1), max_len


@sample(
    inputs,
    {
        "OpenNMT Transformer, training, 64 sentences": (64, 100),
        "OpenNMT Transformer, training, 4096 tokens, length given": (160, 50, 50),
    },
    tags="IfElseBranch InputAware DataDependentShape Reduce Broadcast ViewAttribute",
    project="OpenNMT",
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
