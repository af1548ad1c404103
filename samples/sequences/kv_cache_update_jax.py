from jax import Array


def kv_cache_update(
    key_cache: Array, value_cache: Array, key: Array, value: Array, positions: Array
) -> tuple[Array, Array]:
    """As the torch one beside it, but leaves the caches that it is given."""
    return key_cache.at[:, :, positions].set(key), value_cache.at[:, :, positions].set(value)
