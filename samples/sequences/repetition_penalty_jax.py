"""`repetition_penalty` in JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def repetition_penalty(input_ids: Array, scores: Array, penalty: float) -> Array:
    """As the torch one beside it."""
    met = jnp.take_along_axis(scores, input_ids, axis=1)
    met = jnp.where(met < 0, met * penalty, met / penalty)
    return scores.at[jnp.arange(len(scores))[:, None], input_ids].set(met)
