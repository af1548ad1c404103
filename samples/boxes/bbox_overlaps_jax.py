from typing import Literal

import jax.numpy as jnp
from jax import Array

from opgrip.samples.boxes.box_area_jax import area_between, box_area


def bbox_overlaps(
    bboxes1: Array,
    bboxes2: Array,
    mode: Literal["iou", "iof", "giou"] = "iou",
    is_aligned: bool = False,
    eps: float = 1e-6,
) -> Array:
    if not is_aligned:
        bboxes1, bboxes2 = bboxes1[..., :, None, :], bboxes2[..., None, :, :]
    low = jnp.maximum(bboxes1[..., :2], bboxes2[..., :2])
    high = jnp.minimum(bboxes1[..., 2:], bboxes2[..., 2:])
    shared = area_between(low, high)
    union = box_area(bboxes1)
    if mode != "iof":
        union = union + box_area(bboxes2) - shared
    union = jnp.maximum(union, eps)
    overlap = shared / union
    if mode != "giou":
        return overlap
    low = jnp.minimum(bboxes1[..., :2], bboxes2[..., :2])
    high = jnp.maximum(bboxes1[..., 2:], bboxes2[..., 2:])
    hull = jnp.maximum(area_between(low, high), eps)
    return overlap - (hull - union) / hull
