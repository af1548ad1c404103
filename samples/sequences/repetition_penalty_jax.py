import jax.numpy as jnp
from jax import Array


def repetition_penalty(input_ids: Array, scores: Array, penalty: float) -> Array:
    token_scores = jnp.take_along_axis(scores, input_ids, axis=1)
    token_scores = jnp.where(token_scores < 0, token_scores * penalty, token_scores / penalty)
    return scores.at[jnp.arange(len(scores))[:, None], input_ids].set(token_scores)
