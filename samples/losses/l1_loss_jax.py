import jax.numpy as jnp
from jax import Array

from opgrip.samples.losses.weight_reduce_loss_jax import weighted


@weighted
def l1_loss(predicted: Array, target: Array) -> Array:
    return predicted.sum() * 0 if target.size == 0 else jnp.abs(predicted - target)
