import jax.numpy as jnp
from jax import Array

from opgrip.samples.losses.overlaps_jax import area, enclosing_size, shared_area
from opgrip.samples.losses.weight_reduce_loss_jax import weighted


@weighted
def giou_loss(predicted: Array, target: Array, eps: float = 1e-7) -> Array:
    overlap = shared_area(predicted, target)
    union = jnp.maximum(area(predicted) + area(target) - overlap, eps)
    size = enclosing_size(predicted, target)
    enclosing = jnp.maximum(size[:, 0] * size[:, 1], eps)
    return 1 - (overlap / union - (enclosing - union) / enclosing)
