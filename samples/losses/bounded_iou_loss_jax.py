"""`bounded_iou_loss` in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from opgrip.samples.losses.smooth_l1_loss_jax import smoothed
from opgrip.samples.losses.weight_reduce_loss_jax import weight_reduce_loss


def bounded_iou_loss(
    predicted: Array,
    target: Array,
    weight: Array | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
    beta: float = 0.2,
    eps: float = 1e-3,
) -> Array:
    """As the torch one beside it."""
    target = jax.lax.stop_gradient(target)
    size = predicted[:, 2:] - predicted[:, :2]
    target_size = target[:, 2:] - target[:, :2]
    shift = jnp.abs((target[:, :2] + target[:, 2:]) / 2 - (predicted[:, :2] + predicted[:, 2:]) / 2)
    by_centre = jnp.maximum((target_size - 2 * shift) / (target_size + 2 * shift + eps), 0)
    by_size = jnp.minimum(target_size / (size + eps), size / (target_size + eps))
    lost = jnp.concatenate([1 - by_centre, 1 - by_size], axis=1)
    return weight_reduce_loss(smoothed(lost, beta), weight, reduction, avg_factor)
