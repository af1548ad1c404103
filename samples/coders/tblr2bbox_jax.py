from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array


def tblr2bbox(
    priors: Array,
    tblr: Array,
    normalizer: float | Sequence[float] = 4.0,
    normalize_by_wh: bool = True,
    max_shape: Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> Array:
    distances = tblr * jnp.asarray(normalizer)
    if normalize_by_wh:
        extent = priors[..., 2:] - priors[..., :2]
        distances = distances * extent[..., jnp.array([1, 1, 0, 0])]
    centre = (priors[..., :2] + priors[..., 2:]) / 2
    low, high = distances[..., jnp.array([2, 0])], distances[..., jnp.array([3, 1])]
    boxes = jnp.concatenate([centre - low, centre + high], axis=-1)
    if max_shape is not None:
        most = jnp.asarray(max_shape)[..., jnp.array([1, 0, 1, 0])]
        boxes = jnp.clip(boxes, 0, most[..., None, :])
    return boxes
