"""`giou_loss` in JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from opgrip.samples.losses.overlaps_jax import area, enclosing_size, shared_area
from opgrip.samples.losses.weight_reduce_loss_jax import weight_reduce_loss


def giou_loss(
    predicted: Array,
    target: Array,
    weight: Array | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
    eps: float = 1e-7,
) -> Array:
    """As the torch one beside it."""
    overlap = shared_area(predicted, target)
    union = jnp.maximum(area(predicted) + area(target) - overlap, eps)
    size = enclosing_size(predicted, target)
    enclosing = jnp.maximum(size[:, 0] * size[:, 1], eps)
    loss = 1 - (overlap / union - (enclosing - union) / enclosing)
    return weight_reduce_loss(loss, weight, reduction, avg_factor)
