import torch
from torch import Tensor

from opgrip.samples.sample import sample


@sample(
    lambda draw, experts, bits: (draw.permutation(experts), bits),
    {
        "DSelect-k, MultiMNIST, 8 experts": (8, 3),
        "A gate of 4096 experts": (4096, 12),
    },
    tags="Broadcast ViewAttribute",
    url="https://github.com/PaddlePaddle/PaddleRec/blob/3b416accde4366e26f55f8d27f2453704a146bad/models/multitask/dselect_k/net.py#L190",
)
def dec2bin(values: Tensor, bits: int) -> Tensor:
    """Return the lowest bits of integers, highest bit first: the binary codes by which a gate selects experts.

    Parameters
    ----------
    values : (...) integers, not negative
    bits : number of bits per value

    Returns (..., bits) bool
    Source: Hazimeh et al. 2021, "DSelect-k: Differentiable Selection in the Mixture of Experts", its binary encoding.
    """
    powers = 2 ** torch.arange(bits - 1, -1, -1, device=values.device)
    return values[..., None].bitwise_and(powers) != 0
