import jax.numpy as jnp
from jax import Array


def bbox2delta(
    proposals: Array,
    gt: Array,
    means: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    stds: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
) -> Array:
    centre = (proposals[:, :2] + proposals[:, 2:]) / 2
    extent = proposals[:, 2:] - proposals[:, :2]
    shift = ((gt[:, :2] + gt[:, 2:]) / 2 - centre) / extent
    growth = jnp.log((gt[:, 2:] - gt[:, :2]) / extent)
    deltas = jnp.concatenate([shift, growth], axis=1)
    return (deltas - jnp.array(means, deltas.dtype)) / jnp.array(stds, deltas.dtype)
