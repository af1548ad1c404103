"""`balanced_l1_loss` in JAX."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array

from opgrip.samples.losses.weight_reduce_loss_jax import weight_reduce_loss


def balanced_l1_loss(
    predicted: Array,
    target: Array,
    weight: Array | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
    beta: float = 1.0,
    alpha: float = 0.5,
    gamma: float = 1.5,
) -> Array:
    """As the torch one beside it."""
    if target.size == 0:
        loss = predicted.sum() * 0
    else:
        distance = jnp.abs(predicted - target)
        growth = math.exp(gamma / alpha) - 1
        near = alpha / growth * (growth * distance + 1) * jnp.log(growth * distance / beta + 1) - alpha * distance
        loss = jnp.where(distance < beta, near, gamma * distance + gamma / growth - alpha * beta)
    return weight_reduce_loss(loss, weight, reduction, avg_factor)
