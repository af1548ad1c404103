import jax
import jax.numpy as jnp
from jax import Array

from opgrip.samples.losses.smooth_l1_loss_jax import smoothed
from opgrip.samples.losses.weight_reduce_loss_jax import weighted


@weighted
def bounded_iou_loss(predicted: Array, target: Array, beta: float = 0.2, eps: float = 1e-3) -> Array:
    target = jax.lax.stop_gradient(target)
    size = predicted[:, 2:] - predicted[:, :2]
    target_size = target[:, 2:] - target[:, :2]
    shift = jnp.abs((target[:, :2] + target[:, 2:]) / 2 - (predicted[:, :2] + predicted[:, 2:]) / 2)
    by_centre = jnp.maximum((target_size - 2 * shift) / (target_size + 2 * shift + eps), 0)
    by_size = jnp.minimum(target_size / (size + eps), size / (target_size + eps))
    lost = jnp.concatenate([1 - by_centre, 1 - by_size], axis=1)
    return smoothed(lost, beta)
