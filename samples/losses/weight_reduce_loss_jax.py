"""`weight_reduce_loss` in JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def weight_reduce_loss(
    loss: Array, weight: Array | None = None, reduction: str = "mean", avg_factor: float | None = None
) -> Array:
    """As the torch one beside it."""
    if weight is not None:
        loss = loss * weight
    if reduction == "none":
        return loss
    if reduction == "sum":
        if avg_factor is not None:
            raise ValueError("a sum takes no avg_factor")
        return loss.sum()
    if reduction != "mean":
        raise ValueError(f"reduction {reduction} is none of none, mean, sum")
    if avg_factor is None:
        return loss.mean()
    return loss.sum() / (avg_factor + float(jnp.finfo(jnp.float32).eps))
