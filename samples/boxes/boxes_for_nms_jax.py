"""`boxes_for_nms` in JAX."""

from __future__ import annotations

from jax import Array


def boxes_for_nms(boxes: Array, idxs: Array, class_agnostic: bool = False) -> Array:
    """As the torch one beside it."""
    if class_agnostic:
        return boxes
    offsets = idxs.astype(boxes.dtype) * (boxes.max() + 1)
    return boxes + offsets[:, None]
