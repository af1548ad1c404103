import jax.numpy as jnp
from jax import Array

from opgrip.samples.coders.delta2bbox_jax import delta2bbox


def legacy_delta2bbox(
    rois: Array,
    deltas: Array,
    means: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    stds: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
    max_shape: tuple[int, int] | None = None,
    wh_ratio_clip: float = 16 / 1000,
) -> Array:
    last = None if max_shape is None else (max_shape[0] - 1, max_shape[1] - 1)
    outward = jnp.array([-0.5, -0.5, 0.5, 0.5], rois.dtype)
    return delta2bbox(rois + outward, deltas, means, stds, last, wh_ratio_clip)
