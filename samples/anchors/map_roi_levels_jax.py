import jax.numpy as jnp
from jax import Array


def map_roi_levels(rois: Array, num_levels: int = 4, finest_scale: float = 56) -> Array:
    side = jnp.sqrt((rois[:, 3] - rois[:, 1]) * (rois[:, 4] - rois[:, 2]))
    level = jnp.floor(jnp.log2(side / finest_scale + 1e-6))
    return jnp.clip(level, 0, num_levels - 1).astype(int)
