from math import log

import jax.numpy as jnp
from jax import Array


def delta2bbox(
    rois: Array,
    deltas: Array,
    means: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    stds: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
    max_shape: tuple[int, int] | None = None,
    wh_ratio_clip: float = 16 / 1000,
    ctr_clamp: float | None = None,
) -> Array:
    if len(deltas) == 0:
        return deltas
    moves = deltas.reshape(len(rois), -1, 4) * jnp.array(stds, deltas.dtype) + jnp.array(means, deltas.dtype)
    extent = (rois[:, 2:] - rois[:, :2])[:, None]
    shift, growth = moves[..., :2] * extent, moves[..., 2:]
    limit = -log(wh_ratio_clip)
    if ctr_clamp is None:
        growth = jnp.clip(growth, -limit, limit)
    else:
        shift, growth = jnp.clip(shift, -ctr_clamp, ctr_clamp), jnp.minimum(growth, limit)
    centre = ((rois[:, :2] + rois[:, 2:]) / 2)[:, None] + shift
    half = extent * jnp.exp(growth) / 2
    boxes = jnp.concatenate([centre - half, centre + half], axis=-1)
    if max_shape is not None:
        height, width = max_shape
        boxes = jnp.clip(boxes, 0, jnp.array([width, height, width, height], boxes.dtype))
    return boxes.reshape(deltas.shape)
