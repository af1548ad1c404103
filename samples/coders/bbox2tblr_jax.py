from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array


def bbox2tblr(
    priors: Array, gts: Array, normalizer: float | Sequence[float] = 4.0, normalize_by_wh: bool = True
) -> Array:
    centre_x, centre_y = ((priors[:, :2] + priors[:, 2:]) / 2).T
    left, top, right, bottom = gts.T
    distances = jnp.stack([centre_y - top, bottom - centre_y, centre_x - left, right - centre_x], axis=1)
    if normalize_by_wh:
        width, height = (priors[:, 2:] - priors[:, :2]).T
        distances = distances / jnp.stack([height, height, width, width], axis=1)
    return distances / jnp.asarray(normalizer)
