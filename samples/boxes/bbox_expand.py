import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, boxes: int, num_classes: int) -> Arguments:
    """Return the regression targets, weights and classes of `boxes` sampled boxes; the first quarter are positives.

    num_classes : number of classes with the background, which is class 0
    """
    positives = boxes // 4
    targets, weights = torch.zeros(boxes, 4), torch.zeros(boxes, 4)
    targets[:positives] = draw.normal(positives, 4)
    weights[:positives] = 1.0
    labels = torch.zeros(boxes, dtype=torch.int64)
    labels[:positives] = draw.integers(positives, low=1, high=num_classes)
    return targets, weights, labels, num_classes


@sample(
    inputs,
    {
        "Fast R-CNN, sizes of the paper: 128 regions of two images, VOC": (128, 21),
        "Faster R-CNN R50-FPN, COCO, training, sampled of two images": (1024, 81),
    },
    tags="ForLoop InputAware DataDependentShape InPlace ViewAttribute BuiltInDataStructure",
    url="https://github.com/open-mmlab/mmdetection/blob/51dd329c4f76740d6a85c7cc6e5832ba0dfedbc3/mmdet/core/bbox/bbox_target.py",
)
def bbox_expand(bbox_targets: Tensor, bbox_weights: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return targets and weights for a head that predicts one box per class.

    Parameters
    ----------
    bbox_targets : (N, 4) float, dx dy dw dh
    bbox_weights : (N, 4) float
    labels : (N,) int64, 0 for the background, which has no target
    num_classes : number of classes, including the background

    Returns targets, weights : (N, 4 * num_classes) float, zero except in the four columns of a positive's class
    Source: an early MMDetection, `core.bbox.bbox_target.expand_target`; Girshick 2015, section 2.3.
    """
    rows = bbox_targets.shape[0]
    targets = bbox_targets.new_zeros((rows, 4 * num_classes))
    weights = bbox_weights.new_zeros((rows, 4 * num_classes))
    for row in torch.nonzero(labels > 0).flatten():
        first = 4 * labels[row]
        targets[row, first : first + 4] = bbox_targets[row]
        weights[row, first : first + 4] = bbox_weights[row]
    return targets, weights
