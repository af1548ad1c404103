"""`smooth_l1_loss` in JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from opgrip.samples.losses.weight_reduce_loss_jax import weight_reduce_loss


def smoothed(distance: Array, beta: float) -> Array:
    """As the torch one beside it, here and below."""
    return jnp.where(distance < beta, 0.5 * distance * distance / beta, distance - 0.5 * beta)


def smooth_l1_loss(
    predicted: Array,
    target: Array,
    weight: Array | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
    beta: float = 1.0,
) -> Array:
    """Distances, weighed and reduced."""
    loss = predicted.sum() * 0 if target.size == 0 else smoothed(jnp.abs(predicted - target), beta)
    return weight_reduce_loss(loss, weight, reduction, avg_factor)
