import torch
import torch.nn.functional as F
from torch import Tensor

from opgrip.samples.losses.label_maps import IGNORED, label_maps
from opgrip.samples.losses.resize import resize
from opgrip.samples.sample import Arguments, Draw, sample

CONFIGURATIONS = {
    "PSPNet R101 teaches R18, CamVid, 360x360 crops, scores of 11 classes, one image": (1, 11, 45, (11, 11)),
    "PSPNet R101 teaches R18, Cityscapes, 512x512 crops, features of 512 and 128 channels, one image": (
        1,
        19,
        64,
        (128, 512),
    ),
}


def inputs(draw: Draw, images: int, classes: int, side: int, channels: tuple[int, int]) -> Arguments:
    """Return features of a student and its teacher, and a class for each pixel of images eight times as high and wide.

    images, classes : number of images, and of classes
    side : height and width of the features in cells
    channels : number of channels of the student's and of the teacher's features
    """
    student, teacher = (draw.normal(images, count, side, side) for count in channels)
    labels = label_maps(draw, images, (8 * side, 8 * side), classes)
    return student.requires_grad_(), teacher, labels.unsqueeze(1), classes


@sample(
    inputs,
    CONFIGURATIONS,
    tags="ForLoop IfElseBranch InputAware ViewAttribute AdvancedIndexing DataDependentShape Broadcast InPlace Reduce",
    url="https://github.com/DeepLink-org/DLOP-Bench/blob/a4d4fa7cfdcc6afe3766f3671b3c71ca01a552c6/bench/samples/long_tail/ifv_loss/torch_impl.py",
)
def ifv_loss(
    student: Tensor,
    teacher: Tensor,
    target: Tensor,
    classes: int,
    per_image: bool = True,
    ignore_index: int = IGNORED,
    loss_weight: float = 1.0,
) -> Tensor:
    """Return the mean squared difference of student and teacher in the similarity of pixels to their class's mean.

    Parameters
    ----------
    student : (N, C, h, w) float, resized to the teacher's size
    teacher : (N, C', H, W) float, which gets no gradient
    target : (N, 1, H', W') int64, classes of the pixels, resized to the teacher's size
    per_image : True for class means of each image, False for means over all images
    ignore_index : class of ignored pixels
    loss_weight : factor of the loss

    Returns () float, zero if all pixels are ignored
    Source: Wang et al. 2020, "Intra-class Feature Variation Distillation", section 3.2; the original, of SegmentBase2,
    is only published in DLOP-Bench.
    """
    student, teacher = resize(student, teacher), teacher.detach()
    labels = F.interpolate(target.float(), size=teacher.shape[-2:], mode="nearest")
    mine = F.cosine_similarity(student, _centres(student, labels, classes, per_image), dim=1)
    other = F.cosine_similarity(teacher, _centres(teacher, labels, classes, per_image), dim=1)
    loss = F.mse_loss(mine, other, reduction="none")
    valid = labels.squeeze(1) != ignore_index
    if not valid.any():
        return loss.mean() * 0
    return loss_weight * loss[valid].mean()


def mean_where(features: Tensor, mask: Tensor, dims: tuple[int, ...] = (-2, -1)) -> Tensor:
    """Return the mean over `dims` of features (N, C, H, W) inside a mask (N, 1, H, W), zero for an empty mask.

    The result has four dimensions; those in `dims` have size 1.
    """
    share = mask.to(features.dtype)
    return (share * features).sum(dim=dims, keepdim=True) / (share.sum(dim=dims, keepdim=True) + 1e-6)


def _centres(features: Tensor, labels: Tensor, classes: int, per_image: bool) -> Tensor:
    """Return for each pixel the mean features of its class, (N, C, H, W) float; pixels without a class keep their
    features.

    Parameters
    ----------
    features : (N, C, H, W) float
    labels : (N, 1, H, W), class of each pixel
    classes : number of classes
    per_image : True for means over the pixels of an image, False for means over all images
    """
    dims = (-2, -1) if per_image else (0, -2, -1)
    centres = features.detach().clone()
    for index in range(classes):
        mask = labels == index
        centres = torch.where(mask, mean_where(features, mask, dims), centres)
    return centres
