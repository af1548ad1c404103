"""`l2_loss` in JAX."""

from __future__ import annotations

from jax import Array

from opgrip.samples.losses.weight_reduce_loss_jax import weight_reduce_loss


def l2_loss(
    predicted: Array,
    target: Array,
    weight: Array | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
) -> Array:
    """As the torch one beside it."""
    difference = predicted - target
    return weight_reduce_loss(difference * difference, weight, reduction, avg_factor)
