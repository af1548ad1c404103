import jax.numpy as jnp
from jax import Array

from opgrip.samples.losses.weight_reduce_loss_jax import weighted


def smoothed(distance: Array, beta: float) -> Array:
    return jnp.where(distance < beta, 0.5 * distance * distance / beta, distance - 0.5 * beta)


@weighted
def smooth_l1_loss(predicted: Array, target: Array, beta: float = 1.0) -> Array:
    """Return the smooth L1 loss of each element, for the same arguments as the torch function; the decorator adds a
    weight, reduction and divisor.
    """
    return predicted.sum() * 0 if target.size == 0 else smoothed(jnp.abs(predicted - target), beta)
