import torch
from torch import Tensor

from opgrip.samples.sample import sample


@sample(
    lambda draw, shape, reach, gamma=1.0: (draw.uniform(*shape, low=-reach, high=reach, grad=True), gamma),
    {
        "DSelect-k, MultiMNIST, training, one gate for all examples": ((2, 1, 3), 0.01),
        "DSelect-k, training, a gate by example, batch 256": ((256, 2, 1, 3), 1.0),
    },
    tags="",
    url="https://github.com/PaddlePaddle/PaddleRec/blob/3b416accde4366e26f55f8d27f2453704a146bad/models/multitask/dselect_k/net.py#L121",
)
def smooth_step(values: Tensor, gamma: float = 1.0) -> Tensor:
    """Return a step from 0 to 1 with a cubic, continuously differentiable transition.

    Parameters
    ----------
    values : (...) float
    gamma : width of the transition, centred at 0

    Returns (...) float, 0 to 1
    Source: Hazimeh et al. 2020, "The Tree Ensemble Layer", its smooth-step function.
    """
    between = -2 / gamma**3 * values**3 + 3 / (2 * gamma) * values + 0.5
    not_above = torch.where(values >= gamma / 2, torch.ones_like(values), between)
    return torch.where(values <= -gamma / 2, torch.zeros_like(values), not_above)
