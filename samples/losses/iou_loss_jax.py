"""`iou_loss` in JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from opgrip.samples.losses.overlaps_jax import area, shared_area
from opgrip.samples.losses.weight_reduce_loss_jax import weight_reduce_loss


def iou_loss(
    predicted: Array,
    target: Array,
    weight: Array | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
    mode: str = "log",
    eps: float = 1e-6,
) -> Array:
    """As the torch one beside it."""
    overlap = shared_area(predicted, target)
    union = jnp.maximum(area(predicted) + area(target) - overlap, 1e-6)
    iou = jnp.maximum(overlap / union, eps)
    if mode == "log":
        loss = -jnp.log(iou)
    elif mode == "linear":
        loss = 1 - iou
    elif mode == "square":
        loss = 1 - iou * iou
    else:
        raise ValueError(f"mode {mode} is none of log, linear, square")
    return weight_reduce_loss(loss, weight, reduction, avg_factor)
