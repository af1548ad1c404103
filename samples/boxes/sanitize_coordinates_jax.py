import jax.numpy as jnp
from jax import Array


def sanitize_coordinates(
    x1: Array, x2: Array, img_size: int, padding: int = 0, cast: bool = True
) -> tuple[Array, Array]:
    x1, x2 = x1 * img_size, x2 * img_size
    if cast:
        x1, x2 = x1.astype(int), x2.astype(int)
    x1 = jnp.minimum(x1, x2)
    x2 = jnp.maximum(x1, x2)
    return jnp.maximum(x1 - padding, 0), jnp.minimum(x2 + padding, img_size)
