import torch.nn.functional as F
from torch import Tensor

from opgrip.samples.losses.ifv_loss import CONFIGURATIONS, inputs, mean_where
from opgrip.samples.losses.resize import resize
from opgrip.samples.sample import sample


@sample(
    inputs,
    CONFIGURATIONS,
    tags="ForLoop IfElseBranch ViewAttribute InPlace Broadcast Reduce",
    url="https://github.com/DeepLink-org/DLOP-Bench/blob/a4d4fa7cfdcc6afe3766f3671b3c71ca01a552c6/bench/samples/long_tail/inter_region_loss/torch_impl.py",
)
def inter_region_loss(
    student: Tensor, teacher: Tensor, target: Tensor, classes: int, loss_weight: float = 1.0
) -> Tensor:
    """Return the mean squared difference of the cosine similarities between the mean features of classes.

    Parameters
    ----------
    student : (N, C, h, w) float, resized to the teacher's size
    teacher : (N, C', H, W) float, which gets no gradient
    target : (N, 1, H', W') int64, classes of the pixels, resized to the teacher's size
    loss_weight : factor of the loss

    Returns () float
    Source: Hou et al. 2020, "Inter-Region Affinity Distillation", equation 4, with the mean squared error as the
    graph's distance; the original, of SegmentBase2, is only published in DLOP-Bench.
    """
    student = resize(student, teacher)
    labels = F.interpolate(target.float(), size=teacher.shape[-2:], mode="nearest")
    return loss_weight * F.mse_loss(
        _affinities(student, labels, classes), _affinities(teacher.detach(), labels, classes)
    )


def _affinities(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the cosine similarities between the mean features of any two classes, (N, classes, classes) float.

    The similarities of a class without pixels are zero.

    Parameters
    ----------
    features : (N, C, H, W) float
    labels : (N, 1, H, W), class of each pixel
    classes : number of classes
    """
    centres = features.new_zeros(*features.shape[:2], classes)
    for index in range(classes):
        centres[:, :, index] = mean_where(features, labels == index).flatten(1)
    return F.cosine_similarity(centres.unsqueeze(3), centres.unsqueeze(2), dim=1)
