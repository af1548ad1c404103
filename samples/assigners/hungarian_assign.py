from collections.abc import Sequence

import torch
from torch import Tensor

from opgrip.samples.boxes.box_cxcywh_to_xyxy import box_cxcywh_to_xyxy
from opgrip.samples.boxes.box_xyxy_to_cxcywh import box_xyxy_to_cxcywh
from opgrip.samples.boxes.generalized_box_iou import generalized_box_iou
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, queries: int, classes: int, objects: Sequence[int]) -> Arguments:

    def boxes(count: int) -> Tensor:
        return box_xyxy_to_cxcywh(draw.boxes(count, (1.0, 1.0), smallest=0.02))

    targets = [{"labels": draw.integers(count, high=classes), "boxes": boxes(count)} for count in objects]
    predicted = torch.stack([boxes(queries) for _ in objects]).requires_grad_()
    return draw.normal(len(objects), queries, classes + 1, grad=True), predicted, targets


@sample(
    inputs,
    {
        "DETR R50, COCO, training, 2 images": (100, 91, (7, 3)),
        "DETR R50, COCO panoptic, training, 4 images": (100, 250, (12, 4, 63, 20)),
    },
    tags=(
        "IfElseBranch ForLoop InputAware AdvancedIndexing Reduce Broadcast ViewAttribute "
        "BuiltInDataStructure ThirdPartyCodes"
    ),
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
    """Pair the predictions and truths of each image at the least total cost.

    Parameters
    ----------
    logits : (B, Q, C + 1) float, the last class is the background
    boxes : (B, Q, 4) float, cx cy w h relative to the size of the image
    targets : per image, "labels" (M,) int64 and "boxes" (M, 4) float
    cost_class, cost_bbox, cost_giou : weights of the class probability, the L1 distance of boxes and their generalized
        intersection over union

    Returns
    -------
    per image, the indices of paired predictions and truths, each (min(Q, M),) int64 on the CPU

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
    overlap = generalized_box_iou(box_cxcywh_to_xyxy(predicted), box_cxcywh_to_xyxy(truths))
    cost = (cost_bbox * distance - cost_class * probability - cost_giou * overlap).view(batch, queries, -1).cpu()
    sizes = [len(target["boxes"]) for target in targets]
    pairs = [linear_sum_assignment(part[image]) for image, part in enumerate(cost.split(sizes, dim=2))]
    return [(torch.as_tensor(rows), torch.as_tensor(columns)) for rows, columns in pairs]
