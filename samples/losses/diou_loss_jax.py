"""`diou_loss` in JAX."""

from __future__ import annotations

from jax import Array

from opgrip.samples.losses.overlaps_jax import centre_distance, overlap_ratio
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
    iou = overlap_ratio(predicted, target, eps)
    loss = 1 - (iou - centre_distance(predicted, target, eps))
    return weight_reduce_loss(loss, weight, reduction, avg_factor)
