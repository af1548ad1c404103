import jax.numpy as jnp
from jax import Array


def sliding_window_mask(attention_mask: Array, query_length: int, window: int) -> Array:
    keys = jnp.arange(attention_mask.shape[1])
    queries = keys[len(keys) - query_length :, None]
    is_visible = (keys <= queries) & (keys > queries - window)
    is_visible = is_visible & attention_mask[:, None, None, :]
    return jnp.where(is_visible, 0.0, jnp.finfo(jnp.float32).min).astype(jnp.float32)
