import torch
from torch import Tensor

from opgrip.samples.losses.knowledge_gap_loss import inputs
from opgrip.samples.losses.label_maps import IGNORED
from opgrip.samples.losses.resize import resize
from opgrip.samples.sample import sample

TRUTH = 0.95
"""Probability of the true class in the smoothed truth."""


@sample(
    inputs,
    {
        "UNet-S5-D16, DRIVE, 64x64 crops, training": (1, 2, (64, 64)),
        "UNet-S5-D16, HRF, 256x256 crops, training": (4, 2, (256, 256)),
    },
    tags="IfElseBranch InputAware ViewAttribute AdvancedIndexing DataDependentShape InPlace Broadcast Reduce",
    url="https://github.com/DeepLink-org/DLOP-Bench/blob/a4d4fa7cfdcc6afe3766f3671b3c71ca01a552c6/bench/samples/long_tail/sce_loss/torch_impl.py",
)
def sce_loss(
    cls_score: Tensor,
    label: Tensor,
    teacher: Tensor,
    temperature: float = 1.0,
    channel_sum: bool = False,
    loss_weight: float = 1.0,
) -> Tensor:
    """Return the divergence of student and teacher; the teacher is mixed with the truth if its best class is wrong.

    The larger the gap between the teacher's best and second-best probability, the larger its share in the mixture.

    Parameters
    ----------
    cls_score : (N, C, H, W) float, of the student, of two classes or more
    label : (N, H, W) int64, the true classes; pixels of 255 are ignored
    teacher : (N, C, h, w) float, scores, resized to the student's size, without gradient
    temperature : divisor of both scores
    channel_sum : True to sum the divergence over classes, False for the mean
    loss_weight : factor of the loss

    Returns () float, a mean over pixels, zero if all are ignored
    Source: DLOP-Bench, which does not name an origin; the divergence is that of Hinton et al. 2015.
    """
    teacher = resize(teacher.type_as(cls_score).detach(), cls_score, align_corners=True)
    classes = cls_score.shape[1]
    valid = label != IGNORED
    wrong = (label != teacher.argmax(dim=1)).unsqueeze(1).expand(cls_score.shape)
    class_indices = label.clone().unsqueeze(1)
    class_indices[~valid.unsqueeze(1)] = 0
    truth = torch.full_like(cls_score, (1 - TRUTH) / classes, requires_grad=False).scatter_(1, class_indices, TRUTH)

    probability = (teacher / temperature).softmax(dim=1)
    best, second = probability.topk(2, dim=1).values.split(1, dim=1)
    confidence = best - second
    mixed = probability * confidence + truth * (1 - confidence)
    probability[wrong] = mixed[wrong]

    divergence = probability * (probability.log() - (cls_score / temperature).log_softmax(dim=1))
    of_pixels = divergence.sum(dim=1) if channel_sum else divergence.mean(dim=1)
    if not valid.any():
        return of_pixels.mean() * 0
    return loss_weight * of_pixels[valid].mean()
