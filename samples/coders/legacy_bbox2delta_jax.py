import jax.numpy as jnp
from jax import Array

from opgrip.samples.coders.bbox2delta_jax import bbox2delta


def legacy_bbox2delta(
    proposals: Array,
    gt: Array,
    means: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    stds: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
) -> Array:
    outward = jnp.array([-0.5, -0.5, 0.5, 0.5], proposals.dtype)
    return bbox2delta(proposals + outward, gt + outward, means, stds)
