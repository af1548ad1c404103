import jax.numpy as jnp
from jax import Array


def generate_buckets(
    proposals: Array, num_buckets: int, scale_factor: float = 1.0
) -> tuple[Array, Array, Array, Array, Array, Array]:
    centre = (proposals[:, :2] + proposals[:, 2:]) / 2
    extent = (proposals[:, 2:] - proposals[:, :2]) * scale_factor
    left, top = (centre - extent / 2).T
    right, bottom = (centre + extent / 2).T
    width, height = (extent / num_buckets).T
    middles = jnp.arange((num_buckets + 1) // 2, dtype=proposals.dtype) + 0.5
    across, down = jnp.outer(width, middles), jnp.outer(height, middles)
    return (
        width,
        height,
        left[:, None] + across,
        right[:, None] - across,
        top[:, None] + down,
        bottom[:, None] - down,
    )
