import jax.numpy as jnp
from jax import Array


def grid_anchors(base_anchors: Array, featmap_size: tuple[int, int], stride: tuple[float, float] = (16, 16)) -> Array:
    height, width = featmap_size
    x = jnp.arange(width, dtype=base_anchors.dtype) * stride[0]
    y = jnp.arange(height, dtype=base_anchors.dtype) * stride[1]
    columns, rows = jnp.meshgrid(x, y)
    shifts = jnp.stack([columns, rows, columns, rows], axis=-1).reshape(-1, 1, 4)
    return (base_anchors[None, :, :] + shifts).reshape(-1, 4)
