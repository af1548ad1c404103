import math

import jax.numpy as jnp
from jax import Array

from opgrip.samples.losses.weight_reduce_loss_jax import weighted


@weighted
def balanced_l1_loss(
    predicted: Array, target: Array, beta: float = 1.0, alpha: float = 0.5, gamma: float = 1.5
) -> Array:
    if target.size == 0:
        return predicted.sum() * 0
    distance = jnp.abs(predicted - target)
    growth = math.exp(gamma / alpha) - 1
    near = alpha / growth * (growth * distance + 1) * jnp.log(growth * distance / beta + 1) - alpha * distance
    return jnp.where(distance < beta, near, gamma * distance + gamma / growth - alpha * beta)
