"""Which prediction of a set each truth is learned by, one for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opgrip.samples.box_iou import box_iou
from opgrip.samples.draw import Draw
from opgrip.samples.sample import sample


def inputs(draw: Draw, queries: int, classes: int, objects: Sequence[int]) -> tuple[Any, ...]:
    """Predictions for a batch of images, and so many truths of each."""

    def boxes(count: int) -> Tensor:
        drawn = draw.boxes(count, (1.0, 1.0), smallest=0.02)
        return torch.cat([(drawn[:, :2] + drawn[:, 2:]) / 2, drawn[:, 2:] - drawn[:, :2]], dim=1)

    targets = [{"labels": draw.integers(count, high=classes), "boxes": boxes(count)} for count in objects]
    predicted = torch.stack([boxes(queries) for _ in objects]).requires_grad_()
    return draw.normal(len(objects), queries, classes + 1, grad=True), predicted, targets


@sample(
    inputs,
    {
        "DETR R50, COCO, training, 2 images": {"queries": 100, "classes": 91, "objects": (7, 3)},
        "DETR R50, COCO panoptic, training, 4 images": {"queries": 100, "classes": 250, "objects": (12, 4, 63, 20)},
    },
    tags=[
        "ForLoop",
        "InputAware",
        "AdvancedIndexing",
        "Reduce",
        "Broadcast",
        "ViewAttribute",
        "BuiltInDataStructure",
        "ThirdPartyCodes",
    ],
    project="DETR",
    url="https://github.com/facebookresearch/detr/blob/14602a71482082746399dd6bc5712a9aa8f804d2/models/matcher.py",
)
def hungarian_assign(
    logits: Tensor,
    boxes: Tensor,
    targets: Sequence[dict[str, Tensor]],
    cost_class: float = 1,
    cost_bbox: float = 5,
    cost_giou: float = 2,
) -> list[tuple[Tensor, Tensor]]:
    """Pair the predictions and truths of each image so that the sum of the pairs' costs is least.

    Parameters
    ----------
    logits : (B, Q, C + 1) float, the last for nothing
    boxes : (B, Q, 4) float, x y of the centre, width and height, in sizes of the image
    targets : of each image, "labels" (M,) int64 and "boxes" (M, 4) float
    cost_class, cost_bbox, cost_giou : weights of the class's probability, of the boxes' distance and of their
        generalized overlap

    Returns
    -------
    of each image, indices of predictions and of the truths that they are paired with, (min(Q, M),) int64 each, on the
    CPU

    Source: Carion et al. 2020 (DETR), section 3.1 and appendix A.2.
    """
    # scipy is only needed by this sample
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    batch, queries = logits.shape[:2]
    labels = torch.cat([target["labels"] for target in targets])
    truths = torch.cat([target["boxes"] for target in targets])
    predicted = boxes.detach().flatten(0, 1)
    probability = logits.detach().flatten(0, 1).softmax(dim=1)[:, labels]
    distance = torch.cdist(predicted, truths, p=1)
    overlap = _generalized_iou(_corners(predicted), _corners(truths))
    cost = (cost_bbox * distance - cost_class * probability - cost_giou * overlap).view(batch, queries, -1).cpu()
    sizes = [len(target["boxes"]) for target in targets]
    pairs = [linear_sum_assignment(part[image]) for image, part in enumerate(cost.split(sizes, dim=2))]
    return [(torch.as_tensor(rows), torch.as_tensor(columns)) for rows, columns in pairs]


def _corners(boxes: Tensor) -> Tensor:
    return torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], dim=1)


def _generalized_iou(first: Tensor, second: Tensor) -> Tensor:
    """Of boxes (N, 4) and (M, 4) as corners, (N, M): the overlap less the share of the hull that is outside of both."""
    hull = torch.maximum(first[:, None, 2:], second[:, 2:]) - torch.minimum(first[:, None, :2], second[:, :2])
    area = hull.prod(dim=2)
    overlap = box_iou(first, second)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(dim=1) for boxes in (first, second)]
    # the union is what both areas sum up to, less the part that counts twice
    union = (areas[0][:, None] + areas[1]) / (1 + overlap)
    return overlap - (area - union) / area
