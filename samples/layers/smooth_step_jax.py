import jax.numpy as jnp
from jax import Array


def smooth_step(values: Array, gamma: float = 1.0) -> Array:
    between = -2 / gamma**3 * values**3 + 3 / (2 * gamma) * values + 0.5
    return jnp.where(values <= -gamma / 2, 0.0, jnp.where(values >= gamma / 2, 1.0, between))
