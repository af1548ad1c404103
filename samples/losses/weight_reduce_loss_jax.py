from collections.abc import Callable

import jax.numpy as jnp
from jax import Array


def weight_reduce_loss(
    loss: Array, weight: Array | None = None, reduction: str = "mean", avg_factor: float | None = None
) -> Array:
    if weight is not None:
        loss = loss * weight
    if reduction == "none":
        return loss
    if reduction == "sum":
        if avg_factor is not None:
            raise ValueError("avg_factor requires the reduction mean, got sum")
        return loss.sum()
    if reduction != "mean":
        raise ValueError(f"unknown reduction {reduction}: choose none, mean or sum")
    if avg_factor is None:
        return loss.mean()
    return loss.sum() / (avg_factor + float(jnp.finfo(jnp.float32).eps))


def weighted(loss: Callable[..., Array]) -> Callable[..., Array]:
    """Return a loss that also takes a weight, reduction and avg_factor, from one that returns elementwise losses."""

    def reduced(
        predicted: Array,
        target: Array,
        weight: Array | None = None,
        reduction: str = "mean",
        avg_factor: float | None = None,
        *settings: float | str,
        **named_settings: float | str,
    ) -> Array:
        losses = loss(predicted, target, *settings, **named_settings)
        return weight_reduce_loss(losses, weight, reduction, avg_factor)

    return reduced
