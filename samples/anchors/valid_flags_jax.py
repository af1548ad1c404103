import jax.numpy as jnp
from jax import Array


def valid_flags(featmap_size: tuple[int, int], valid_size: tuple[int, int], num_base_anchors: int = 1) -> Array:
    """Return the same flags as the torch function, for the same arguments, on JAX's default device."""
    rows = jnp.arange(featmap_size[0]) < valid_size[0]
    columns = jnp.arange(featmap_size[1]) < valid_size[1]
    return jnp.repeat((rows[:, None] & columns[None, :]).reshape(-1), num_base_anchors)
