import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, images: int, queries: int, classes: int, size: tuple[int, int] = (480, 640)) -> Arguments:
    centre = draw.uniform(images, queries, 2)
    extent = draw.uniform(images, queries, 2, low=0.02, high=0.6)
    outputs = {
        "pred_logits": draw.normal(images, queries, classes + 1, std=2.0),
        "pred_boxes": torch.cat([centre, extent], dim=2),
    }
    return outputs, torch.tensor(size) + draw.integers(images, 2, high=32)


@sample(
    inputs,
    {
        "DETR R50, COCO, predicting, one image": (1, 100, 91),
        "DETR R50, COCO, predicting, 16 images": (16, 100, 91),
    },
    tags="ForLoop Reduce Broadcast ViewAttribute BuiltInDataStructure",
    url="https://github.com/facebookresearch/detr/blob/14602a71482082746399dd6bc5712a9aa8f804d2/models/detr.py#L258",
    atol=1e-3,
)
def detr_postprocess(outputs: dict[str, Tensor], sizes: Tensor) -> list[dict[str, Tensor]]:
    """Return the most probable class and the box in pixels of each query.

    Parameters
    ----------
    outputs : "pred_logits", (B, Q, classes + 1) float, the last class for no object; "pred_boxes", (B, Q, 4) float,
        cx cy w h relative to the image
    sizes : (B, 2) integers, height and width of each image in pixels

    Returns one dict per image: "scores", (Q,) float, "labels", (Q,) int64, and "boxes", (Q, 4) float, x1 y1 x2 y2 in
    pixels
    Source: Carion et al. 2020, "End-to-End Object Detection with Transformers" (DETR).
    """
    scores, labels = outputs["pred_logits"].softmax(dim=-1)[..., :-1].max(dim=-1)
    centre, extent = outputs["pred_boxes"].split(2, dim=-1)
    whole = sizes.flip(1)[:, None]
    boxes = torch.cat([(centre - extent / 2) * whole, (centre + extent / 2) * whole], dim=-1)
    return [
        {"scores": score, "labels": label, "boxes": box}
        for score, label, box in zip(scores, labels, boxes, strict=True)
    ]
