import jax.numpy as jnp
from jax import Array


def rotary_embedding(query: Array, key: Array, cos: Array, sin: Array, unsqueeze_dim: int = 1) -> tuple[Array, Array]:
    cos, sin = jnp.expand_dims(cos, unsqueeze_dim), jnp.expand_dims(sin, unsqueeze_dim)
    return _turn(query, cos, sin), _turn(key, cos, sin)


def _turn(states: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(states, 2, axis=-1)
    return states * cos + jnp.concatenate([-second, first], axis=-1) * sin
