import jax.numpy as jnp
from jax import Array

from opgrip.samples.boxes.box_area_jax import area_between
from opgrip.samples.boxes.box_iou_jax import box_iou


def generalized_box_iou(first: Array, second: Array) -> Array:
    """Return the same as the torch function, without its check of the boxes: jit cannot branch on values."""
    overlap, union = box_iou(first, second)
    first, second = first[..., :, None, :], second[..., None, :, :]
    low = jnp.minimum(first[..., :2], second[..., :2])
    high = jnp.maximum(first[..., 2:], second[..., 2:])
    hull = area_between(low, high)
    return overlap - (hull - union) / hull
