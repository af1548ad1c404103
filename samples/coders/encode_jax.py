import jax.numpy as jnp
from jax import Array

from opgrip.samples.coders.decode import VARIANCES


def encode(matched: Array, priors: Array, use_yolo_regressors: bool = False) -> Array:
    shift = (matched[:, :2] + matched[:, 2:]) / 2 - priors[:, :2]
    growth = jnp.log((matched[:, 2:] - matched[:, :2]) / priors[:, 2:])
    if not use_yolo_regressors:
        shift, growth = shift / (VARIANCES[0] * priors[:, 2:]), growth / VARIANCES[1]
    return jnp.concatenate([shift, growth], axis=1)
