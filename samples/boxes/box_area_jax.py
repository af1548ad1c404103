import jax.numpy as jnp
from jax import Array


def box_area(boxes: Array) -> Array:
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def area_between(low: Array, high: Array) -> Array:
    """Return the areas (...) of rectangles, given the low and the high corner (..., 2) float of each, as in
    `box_area.py`.
    """
    return jnp.clip(high - low, 0).prod(axis=-1)
