import jax.numpy as jnp
from jax import Array

from opgrip.samples.coders.decode import VARIANCES


def decode(loc: Array, priors: Array, use_yolo_regressors: bool = False) -> Array:
    if use_yolo_regressors:
        centre, extent = priors[:, :2] + loc[:, :2], priors[:, 2:] * jnp.exp(loc[:, 2:])
    else:
        centre = priors[:, :2] + loc[:, :2] * VARIANCES[0] * priors[:, 2:]
        extent = priors[:, 2:] * jnp.exp(loc[:, 2:] * VARIANCES[1])
    corner = centre - extent / 2
    return jnp.concatenate([corner, corner + extent], axis=1)
