import jax
from jax import Array

from opgrip.samples.losses.weight_reduce_loss_jax import weight_reduce_loss


def sigmoid_focal_loss(
    pred: Array,
    target: Array,
    weight: Array | None = None,
    gamma: float = 2.0,
    alpha: float = 0.25,
    reduction: str = "mean",
    avg_factor: float | None = None,
) -> Array:
    probability = jax.nn.sigmoid(pred)
    target = target.astype(pred.dtype)
    off = (1 - probability) * target + probability * (1 - target)
    focus = (alpha * target + (1 - alpha) * (1 - target)) * off**gamma
    loss = (jax.nn.softplus(pred) - pred * target) * focus
    if weight is not None:
        weight = weight.astype(pred.dtype).reshape(-1, *[1] * (pred.ndim - 1))
    return weight_reduce_loss(loss, weight, reduction, avg_factor)
