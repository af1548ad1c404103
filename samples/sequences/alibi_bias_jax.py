import jax.numpy as jnp
from jax import Array

from opgrip.samples.sequences.alibi_bias import slopes


def alibi_bias(attention_mask: Array, heads: int) -> Array:
    position = (attention_mask.cumsum(axis=1) - 1) * attention_mask
    slope = jnp.array(slopes(heads), dtype=jnp.float32)
    bias = slope[:, None] * position[:, None, :].astype(jnp.float32)
    return bias.reshape(-1, 1, attention_mask.shape[1])
