import jax.numpy as jnp
from jax import Array


def sequence_mask(lengths: Array, max_len: int | None = None) -> Array:
    if max_len is None:
        max_len = int(lengths.max())
    return jnp.arange(max_len, dtype=lengths.dtype) < lengths[:, None]
