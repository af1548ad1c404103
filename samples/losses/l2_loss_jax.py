from jax import Array

from opgrip.samples.losses.weight_reduce_loss_jax import weighted


@weighted
def l2_loss(predicted: Array, target: Array) -> Array:
    difference = predicted - target
    return difference * difference
