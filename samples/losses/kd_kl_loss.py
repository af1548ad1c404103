import torch.nn.functional as F
from torch import Tensor

from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, rows: int, classes: int, temperature: float, divisor: float | None = None) -> Arguments:
    pred, soft_label = draw.normal(rows, classes, grad=True), draw.normal(rows, classes, std=2.0)
    return pred, soft_label, temperature, None if divisor is None else draw.uniform(rows), "mean", divisor


@sample(
    inputs,
    {
        "LD GFL R101 teaches R18, COCO, training, 17 bins of the 4 sides of 64 positives": (4 * 64, 17, 10.0, 4.0),
        "ResNet-34 teaches ResNet-18, ImageNet, training, 256 images": (256, 1000, 4.0),
    },
    tags="IfElseBranch Reduce",
    project="MMDetection",
    url="https://arxiv.org/abs/1503.02531",
)
def kd_kl_loss(
    pred: Tensor,
    soft_label: Tensor,
    temperature: float = 10.0,
    weight: Tensor | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
) -> Tensor:
    """Return the divergence of student and teacher distributions, averaged over classes, times the squared temperature.

    Parameters
    ----------
    pred : (N, C) float, scores of the student
    soft_label : (N, C) float, scores of the teacher, which get no gradient
    temperature : divisor of both scores; its square keeps the size of the gradient
    weight : (N,) float
    reduction, avg_factor : as in `weight_reduce_loss`

    Returns () float, or (N,) for the reduction "none"
    Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", section 2, as in MMDetection.
    """
    target = (soft_label / temperature).softmax(dim=1).detach()
    divergence = F.kl_div((pred / temperature).log_softmax(dim=1), target, reduction="none")
    return weight_reduce_loss(divergence.mean(dim=1) * temperature**2, weight, reduction, avg_factor)
