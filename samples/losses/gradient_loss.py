import torch
import torch.nn.functional as F
from torch import Tensor

from opgrip.samples.losses.label_maps import IGNORED, label_maps
from opgrip.samples.losses.resize import resize
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(
    draw: Draw, images: int, classes: int, size: tuple[int, int], student: tuple[int, int] | None = None
) -> Arguments:
    """Return random scores of a student and its teacher, and the true classes of the pixels.

    images, classes : number of images, and of classes
    size : height and width in pixels of the teacher's scores and of the classes
    student : height and width of the student's scores; None for `size`
    """
    scores = draw.normal(images, classes, *(student or size), grad=True)
    return scores, draw.normal(images, classes, *size), label_maps(draw, images, size, classes)


@sample(
    inputs,
    {
        "PSPNet R101 teaches R18, CamVid, 360x360 crops, 45x45 scores, one image": (1, 11, (45, 45)),
        "PSPNet R101 teaches R18, Cityscapes, 512x512 crops, 64x64 scores, 8 images": (8, 19, (64, 64), (32, 32)),
    },
    tags="ForLoop IfElseBranch InputAware ViewAttribute AdvancedIndexing DataDependentShape Reduce",
    url="https://github.com/DeepLink-org/DLOP-Bench/blob/a4d4fa7cfdcc6afe3766f3671b3c71ca01a552c6/bench/samples/long_tail/gradient_loss/torch_impl.py",
)
def gradient_loss(
    student: Tensor, teacher: Tensor, label: Tensor, ignore_index: int = IGNORED, loss_weight: float = 1.0
) -> Tensor:
    """Return the mean squared difference of the Sobel gradient directions of two score maps.

    Parameters
    ----------
    student : (N, C, h, w) float, resized to the teacher's size
    teacher : (N, C, H, W) float
    label : (N, H', W') or (N, 1, H', W') int64, resized to the teacher's size
    ignore_index : label of ignored pixels
    loss_weight : factor of the loss

    Returns () float: sum of the means of both components, zero if all pixels are ignored
    Source: SegmentBase2, only published in DLOP-Bench; the gradient is that of Sobel and Feldman.
    """
    student = resize(student, teacher)
    if label.dim() == 3:
        label = label.unsqueeze(1)
    if label.shape[-2:] != teacher.shape[-2:]:
        label = F.interpolate(label.float(), size=teacher.shape[-2:], mode="nearest")
    valid = label != ignore_index
    if not valid.any():
        return student.mean() * 0
    valid = valid.expand(teacher.shape)
    pairs = zip(_directions(student), _directions(teacher), strict=True)
    across, down = (F.mse_loss(mine, other, reduction="none")[valid].mean() for mine, other in pairs)
    return loss_weight * (across + down)


def _directions(maps: Tensor) -> tuple[Tensor, Tensor]:
    channels = maps.shape[1]
    sobel = maps.new_tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]])
    across, down = (
        F.conv2d(maps, kernel.expand(channels, 1, 3, 3), padding=1, groups=channels) for kernel in (sobel, sobel.t())
    )
    length = torch.sqrt(across.square() + down.square() + 1e-5)
    return across / length, down / length
