from jax import Array

from opgrip.samples.losses.overlaps_jax import centre_distance, overlap_ratio
from opgrip.samples.losses.weight_reduce_loss_jax import weighted


@weighted
def diou_loss(predicted: Array, target: Array, eps: float = 1e-7) -> Array:
    iou = overlap_ratio(predicted, target, eps)
    return 1 - (iou - centre_distance(predicted, target, eps))
