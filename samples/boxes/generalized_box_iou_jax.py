from jax import Array

from opgrip.samples.boxes.bbox_overlaps_jax import bbox_overlaps


def generalized_box_iou(first: Array, second: Array) -> Array:
    """Return the same as the torch function for the same boxes, without checking them: jit cannot branch on values."""
    return bbox_overlaps(first, second, "giou", eps=0.0)
