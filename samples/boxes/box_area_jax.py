import jax.numpy as jnp
from jax import Array


def box_area(boxes: Array) -> Array:
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def area_between(low: Array, high: Array) -> Array:
    """Return the same as the torch function."""
    return jnp.clip(high - low, 0).prod(axis=-1)
