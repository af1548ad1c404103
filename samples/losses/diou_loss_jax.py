"""`diou_loss` in JAX."""

from __future__ import annotations

from jax import Array

from opgrip.samples.losses.overlaps_jax import area, centre_distance, shared_area
from opgrip.samples.losses.weight_reduce_loss_jax import weight_reduce_loss


def diou_loss(
    predicted: Array,
    target: Array,
    weight: Array | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
    eps: float = 1e-7,
) -> Array:
    """As the torch one beside it."""
    overlap = shared_area(predicted, target)
    iou = overlap / (area(predicted) + area(target) - overlap + eps)
    loss = 1 - (iou - centre_distance(predicted, target, eps))
    return weight_reduce_loss(loss, weight, reduction, avg_factor)
