import jax.numpy as jnp
from jax import Array


def gen_base_anchors(
    base_size: float,
    scales: Array,
    ratios: Array,
    scale_major: bool = True,
    center_offset: float = 0.0,
    center: tuple[float, float] | None = None,
) -> Array:
    middle = jnp.array((center_offset * base_size,) * 2 if center is None else center, dtype=scales.dtype)
    root = jnp.sqrt(ratios)
    extent = base_size * scales[:, None] * jnp.stack([1 / root, root])[:, None, :]
    if scale_major:
        extent = extent.swapaxes(1, 2)
    half = extent.reshape(2, -1).T / 2
    return jnp.concatenate([middle - half, middle + half], axis=1)
