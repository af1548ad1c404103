from torch import Tensor

from opgrip.samples.losses.focal_loss import inputs as pixels
from opgrip.samples.losses.label_maps import IGNORED
from opgrip.samples.losses.resize import resize
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, images: int, classes: int, size: tuple[int, int]) -> Arguments:
    """Return a student's scores per pixel, the true classes, and a teacher's scores at an eighth of the height and
    width.

    images, classes : number of images, and of classes
    size : height and width of the images in pixels
    """
    scores, labels = pixels(draw, images, classes, size)
    return scores, labels, draw.normal(images, classes, size[0] // 8, size[1] // 8, std=2.0)


@sample(
    inputs,
    {
        "UNet-S5-D16, DRIVE, 64x64 crops, training": (4, 2, (64, 64)),
        "DeepLabV3 R101-D8 teaches R18-D8, Pascal VOC, 512x512 crops, one image": (1, 21, (512, 512)),
    },
    tags="IfElseBranch ViewAttribute AdvancedIndexing DataDependentShape InPlace Reduce",
    url="https://github.com/DeepLink-org/DLOP-Bench/blob/a4d4fa7cfdcc6afe3766f3671b3c71ca01a552c6/bench/samples/long_tail/knowledge_gap_loss/torch_impl.py",
)
def knowledge_gap_loss(
    cls_score: Tensor, label: Tensor, teacher: Tensor, temperature: float = 1.0, loss_weight: float = 1.0
) -> Tensor:
    """Return the divergence of student and teacher, weighted by the gap between their scores of the true class.

    Parameters
    ----------
    cls_score : (N, C, H, W) float, of the student
    label : (N, H, W) int64, the true classes; pixels of 255 are ignored
    teacher : (N, C, h, w) float, scores, resized to the student's size, without gradient
    temperature : divisor of both scores
    loss_weight : factor of the loss

    Returns () float, a mean over pixels
    Source: SegmentBase2, only published in DLOP-Bench; the divergence is that of Hinton et al. 2015, "Distilling the
    Knowledge in a Neural Network".
    """
    teacher = resize(teacher.type_as(cls_score).detach(), cls_score, align_corners=True)
    valid = label != IGNORED
    class_indices = label.clone()
    class_indices[~valid] = 0
    class_indices = class_indices.unsqueeze(1)
    student = cls_score / temperature
    probability = (teacher / temperature).softmax(dim=1)
    surer = probability.gather(1, class_indices) - student.softmax(dim=1).detach().gather(1, class_indices)
    divergence = probability * (probability.log() - student.log_softmax(dim=1))
    weighed = (surer.clamp(min=0).expand(cls_score.shape) * divergence).sum(dim=1)
    return loss_weight * weighed[valid].mean()
