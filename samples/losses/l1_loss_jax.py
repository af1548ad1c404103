"""`l1_loss` in JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from opgrip.samples.losses.weight_reduce_loss_jax import weight_reduce_loss


def l1_loss(
    predicted: Array,
    target: Array,
    weight: Array | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
) -> Array:
    """As the torch one beside it."""
    loss = predicted.sum() * 0 if target.size == 0 else jnp.abs(predicted - target)
    return weight_reduce_loss(loss, weight, reduction, avg_factor)
