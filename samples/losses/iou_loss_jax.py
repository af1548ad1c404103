import jax.numpy as jnp
from jax import Array

from opgrip.samples.losses.overlaps_jax import area, shared_area
from opgrip.samples.losses.weight_reduce_loss_jax import weighted


@weighted
def iou_loss(predicted: Array, target: Array, mode: str = "log", eps: float = 1e-6) -> Array:
    overlap = shared_area(predicted, target)
    union = jnp.maximum(area(predicted) + area(target) - overlap, 1e-6)
    iou = jnp.maximum(overlap / union, eps)
    if mode == "log":
        return -jnp.log(iou)
    if mode == "linear":
        return 1 - iou
    if mode == "square":
        return 1 - iou * iou
    raise ValueError(f"unknown mode {mode}: choose log, linear or square")
