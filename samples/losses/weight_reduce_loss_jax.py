from collections.abc import Callable
from typing import Any

from jax import Array

from opgrip.samples.losses import weight_reduce_loss as for_torch

# its arithmetic is that of arrays too
weight_reduce_loss: Callable[..., Any] = for_torch.weight_reduce_loss


def weighted(loss: Callable[..., Array]) -> Callable[..., Array]:
    """Return a loss with the further parameters `weight`, `reduction` and `avg_factor`, as in `weight_reduce_loss`.

    loss : function that returns the loss of each element
    """

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
        reduced_loss: Array = weight_reduce_loss(losses, weight, reduction, avg_factor)
        return reduced_loss

    return reduced
