import jax.numpy as jnp
from jax import Array


def masks_to_boxes(masks: Array) -> Array:
    if masks.size == 0:
        return jnp.zeros((0, 4), jnp.float32)
    height, width = masks.shape[-2:]
    x1, x2 = _range(masks, jnp.arange(width, dtype=jnp.float32)[None, :])
    y1, y2 = _range(masks, jnp.arange(height, dtype=jnp.float32)[:, None])
    return jnp.stack([x1, y1, x2, y2], axis=1)


def _range(masks: Array, positions: Array) -> tuple[Array, Array]:
    held = masks * positions
    return jnp.where(masks.astype(bool), held, 1e8).min(axis=(1, 2)), held.max(axis=(1, 2))
