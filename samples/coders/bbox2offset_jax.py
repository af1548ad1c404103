import jax.numpy as jnp
from jax import Array

from opgrip.samples.coders.legacy_bbox2delta_jax import legacy_bbox2delta


def bbox2offset(
    boxes: Array, gt_boxes: Array, weights: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
) -> Array:
    return legacy_bbox2delta(boxes, gt_boxes) * jnp.array(weights, boxes.dtype)
