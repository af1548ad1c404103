import jax.numpy as jnp
from jax import Array


def squash(vectors: Array, eps: float = 1e-8) -> Array:
    squared = jnp.square(vectors).sum(axis=-1, keepdims=True)
    return squared / (1 + squared) / jnp.sqrt(squared + eps) * vectors
