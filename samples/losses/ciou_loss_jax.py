import math

import jax
import jax.numpy as jnp
from jax import Array

from opgrip.samples.losses.overlaps_jax import centre_distance, overlap_ratio
from opgrip.samples.losses.weight_reduce_loss_jax import weighted


def _angle(boxes: Array, eps: float) -> Array:
    return jnp.arctan((boxes[:, 2] - boxes[:, 0]) / (boxes[:, 3] - boxes[:, 1] + eps))


@weighted
def ciou_loss(predicted: Array, target: Array, eps: float = 1e-7) -> Array:
    iou = overlap_ratio(predicted, target, eps)
    unlike = 4 / math.pi**2 * (_angle(target, eps) - _angle(predicted, eps)) ** 2
    share = jax.lax.stop_gradient((iou > 0.5) * unlike / (1 - iou + unlike))
    ciou = iou - (centre_distance(predicted, target, eps) + share * unlike)
    return 1 - jnp.clip(ciou, -1.0, 1.0)
