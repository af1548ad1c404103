import torch
from torch import Tensor

from opgrip.samples.boxes.boxes_for_nms import boxes_for_nms
from opgrip.samples.boxes.nms import nms
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, boxes: int, classes: int, score_threshold: float, candidates: int) -> Arguments:
    """Return random boxes, ten for each object, with class probabilities that favour the object's class.

    boxes, classes : number of boxes, and of their classes
    score_threshold, candidates : passed to `multiclass_nms`
    """
    objects = boxes // 10
    truths = draw.boxes(objects)
    predicted = draw.near(truths.repeat_interleave(10 * classes, dim=0)).reshape(boxes, classes, 4)
    likely = torch.nn.functional.one_hot(draw.integers(objects, high=classes), classes).repeat_interleave(10, dim=0)
    scores = (draw.normal(boxes, classes) + 6 * likely).softmax(dim=1)
    return predicted, scores, score_threshold, 0.5, candidates, 100


@sample(
    inputs,
    {
        "built-in Faster R-CNN, 256x256, prediction": (200, 20, 0.01, 150),
        "Faster R-CNN R50-FPN, 800x1333, prediction, the best 1000": (1000, 80, 0.05, 1000),
    },
    tags=(
        "ForLoop InputAware DataDependentShape AdvancedIndexing IfElseBranch Reduce "
        "BuiltInDataStructure ViewAttribute Broadcast"
    ),
    url="https://github.com/open-mmlab/mmdetection/blob/v3.3.0/mmdet/models/layers/bbox_nms.py",
)
def multiclass_nms(
    boxes: Tensor, scores: Tensor, score_threshold: float, iou_threshold: float, candidates: int, limit: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the detections of all classes after non-maximum suppression within each class.

    Parameters
    ----------
    boxes : (N, C, 4) float, one box per class, x1 y1 x2 y2 in pixels
    scores : (N, C) float
    score_threshold : lower scores are dropped
    iou_threshold : overlap above which the lower-scored box of a class is suppressed
    candidates : number of best scores to consider
    limit : most detections to return

    Returns boxes (K, 4), scores (K,), labels (K,) int64, by descending score
    Source: Girshick et al. 2014, section 2.2; MMDetection, which considers all scores.
    """
    row, label = torch.nonzero(scores > score_threshold, as_tuple=True)
    values = scores[row, label]
    order = values.topk(min(candidates, values.numel())).indices
    row, label, values = row[order], label[order], values[order]
    candidate_boxes = boxes[row, label]
    if candidate_boxes.numel() == 0:
        return candidate_boxes, values, label
    # shifted to start at zero, since the largest coordinate separates the classes
    survivors = nms(boxes_for_nms(candidate_boxes - candidate_boxes.min(), label), values, iou_threshold)[:limit]
    return candidate_boxes[survivors], values[survivors], label[survivors]
