import torch.nn.functional as F
from torch import Tensor

from opgrip.samples.sample import sample


@sample(
    lambda draw, positives, instances, coefficients=32: (
        draw.normal(positives, coefficients, grad=True),
        draw.integers(positives, high=instances),
    ),
    {
        "YOLACT R101-FPN, 550x550, training, 100 positive priors of 7 instances": (100, 7),
        "YOLACT R101-FPN, 550x550, training, 600 positive priors of 30 instances": (600, 30),
    },
    tags="ViewAttribute Broadcast Reduce",
    url="https://github.com/dbolya/yolact/blob/57b8f2d95e62e2e649b382f516ab41f949b57239/layers/modules/multibox_loss.py#L475",
)
def coeff_diversity_loss(coeffs: Tensor, instances: Tensor, alpha: float = 1.0) -> Tensor:
    """Return the cosine distance of coefficients of the same instance plus the cosine similarity of different ones.

    Parameters
    ----------
    coeffs : (P, K) float, of the positive priors
    instances : (P,) or (P, 1), index of each prior's instance
    alpha : factor of the loss

    Returns () float: the sum over all pairs divided by P; the caller divides by P again
    Source: YOLACT's code, `coeff_diversity_loss`; Bolya et al. 2019.
    """
    instances = instances.view(-1)
    unit = F.normalize(coeffs, dim=1)
    similarity = (unit @ unit.t() + 1) / 2
    same = (instances[:, None] == instances[None, :]).float()
    loss = (1 - similarity) * same + similarity * (1 - same)
    return alpha * loss.sum() / len(coeffs)
