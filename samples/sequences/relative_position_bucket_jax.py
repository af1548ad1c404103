from math import log

import jax.numpy as jnp
from jax import Array


def relative_position_bucket(
    relative_position: Array, bidirectional: bool = True, num_buckets: int = 32, max_distance: int = 128
) -> Array:
    if bidirectional:
        num_buckets //= 2
        first = (relative_position > 0) * num_buckets
        distance = jnp.abs(relative_position)
    else:
        first = jnp.zeros_like(relative_position)
        distance = -jnp.minimum(relative_position, 0)
    exact = num_buckets // 2
    growth = jnp.log(distance.astype(jnp.float32) / exact) / log(max_distance / exact)
    wide = jnp.minimum(exact + growth * (num_buckets - exact), num_buckets - 1)
    return first + jnp.where(distance < exact, distance, wide.astype(distance.dtype))
