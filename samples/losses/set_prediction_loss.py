import torch
from torch import Tensor
from torch.nn import functional

from opgrip.samples.losses.giou_loss import giou_loss
from opgrip.samples.losses.l1_loss import l1_loss
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, queries: int, classes: int, objects: int) -> Arguments:
    truths = torch.cat([draw.uniform(objects, 2, low=0.3, high=0.7), draw.uniform(objects, 2, low=0.05, high=0.5)], 1)
    logits, boxes = draw.normal(queries, classes + 1), draw.uniform(queries, 4, low=0.2, high=0.8)
    pairs = draw.permutation(queries)[:objects].sort().values, draw.permutation(objects)
    return logits.requires_grad_(), boxes.requires_grad_(), *pairs, draw.integers(objects, high=classes), truths


def _corners(boxes: Tensor) -> Tensor:
    """Return boxes (N, 4) float as x1 y1 x2 y2, given as centre and size: cx cy w h."""
    return torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], dim=1)


@sample(
    inputs,
    {
        "DETR R50, COCO, training, 7 objects": (100, 91, 7),
        "DETR R50, COCO panoptic, training, 20 objects": (100, 250, 20),
    },
    tags="IfElseBranch AdvancedIndexing InPlace Reduce ViewAttribute BuiltInDataStructure",
    url="https://github.com/facebookresearch/detr/blob/14602a71482082746399dd6bc5712a9aa8f804d2/models/detr.py",
)
def set_prediction_loss(
    logits: Tensor,
    boxes: Tensor,
    queries: Tensor,
    owners: Tensor,
    labels: Tensor,
    truths: Tensor,
    no_object: float = 0.1,
) -> dict[str, Tensor]:
    """Return the losses of one image's classes and boxes.

    Parameters
    ----------
    logits : (Q, C + 1) float, the last for no object
    boxes : (Q, 4) float, cx cy w h relative to the image
    queries, owners : (T,) int64, indices of matched predictions and objects
    labels : (T,) int64
    truths : (T, 4) float, like `boxes`
    no_object : weight of unmatched predictions

    Returns `loss_ce`, `loss_bbox`, `loss_giou` : () float each
    Source: Carion et al. 2020, section 3.1.
    """
    nothing = logits.shape[1] - 1
    weight = logits.new_ones(nothing + 1)
    weight[nothing] = no_object
    classes = torch.full((len(logits),), nothing, dtype=torch.int64, device=logits.device)
    classes[queries] = labels[owners]

    matched_boxes, matched_truths = boxes[queries], truths[owners]
    count = max(len(labels), 1)
    return {
        "loss_ce": functional.cross_entropy(logits, classes, weight),
        "loss_bbox": l1_loss(matched_boxes, matched_truths, reduction="sum") / count,
        "loss_giou": giou_loss(_corners(matched_boxes), _corners(matched_truths), reduction="sum") / count,
    }
