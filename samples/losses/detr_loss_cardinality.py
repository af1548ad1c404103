import torch
import torch.nn.functional as F
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, objects: tuple[int, ...], queries: int = 100, classes: int = 91) -> Arguments:
    """Return class scores of queries, most of them for no object, and the truths of each image.

    objects : number of objects of each image
    queries : number of queries of each image
    classes : number of classes without that for no object
    """
    logits = draw.normal(len(objects), queries, classes + 1)
    logits[..., -1] += 4
    boxes = draw.uniform(len(objects), queries, 4)
    targets = [{"labels": draw.integers(count, high=classes), "boxes": draw.uniform(count, 4)} for count in objects]
    return {"pred_logits": logits, "pred_boxes": boxes}, targets


@sample(
    inputs,
    {
        "DETR R50, 100 queries, COCO, training, 2 images": ((7, 3),),
        "DETR R50, 100 queries, COCO, training, 4 images, one of them empty": ((7, 21, 0, 1),),
    },
    tags="BuiltInDataStructure ForLoop Reduce",
    url="https://github.com/facebookresearch/detr/blob/14602a71482082746399dd6bc5712a9aa8f804d2/models/detr.py#L130",
)
@torch.no_grad()
def detr_loss_cardinality(outputs: dict[str, Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean error of the predicted number of objects, for logs. It has no gradient.

    Parameters
    ----------
    outputs : "pred_logits", (N, Q, C + 1) float, the last class for no object
    targets : per image, "labels", (T,)

    Returns "cardinality_error", () float
    Source: DETR's code, `SetCriterion.loss_cardinality`; Carion et al. 2020.
    """
    logits = outputs["pred_logits"]
    counts = torch.as_tensor([len(target["labels"]) for target in targets], device=logits.device)
    predicted_counts = (logits.argmax(dim=-1) != logits.shape[-1] - 1).sum(dim=1)
    return {"cardinality_error": F.l1_loss(predicted_counts.float(), counts.float())}
