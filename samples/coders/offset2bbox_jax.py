from math import log

import jax.numpy as jnp
from jax import Array


def offset2bbox(
    boxes: Array, offset: Array, weights: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
) -> Array:
    if boxes.size == 0 or offset.size == 0:
        return jnp.zeros((0, 4), boxes.dtype)
    moves = offset.reshape(len(boxes), -1, 4) / jnp.array(weights, boxes.dtype)
    extent = (boxes[:, 2:] - boxes[:, :2] + 1)[:, None]
    middle = moves[..., :2] * extent + boxes[:, None, :2] + extent / 2
    half = jnp.exp(jnp.minimum(moves[..., 2:], log(1000 / 16))) * extent / 2
    return jnp.concatenate([middle - half, middle + half - 1], axis=-1).reshape(offset.shape)
