import jax
import jax.numpy as jnp
from jax import Array

from opgrip.samples.coders.generate_buckets_jax import generate_buckets


def bucket2bbox(
    proposals: Array,
    cls_preds: Array,
    offset_preds: Array,
    num_buckets: int,
    scale_factor: float = 1.0,
    max_shape: tuple[int, int] | None = None,
) -> tuple[Array, Array]:
    width, height, *sides = generate_buckets(proposals, num_buckets, scale_factor)
    buckets = sides[0].shape[1]
    scores, labels = jax.lax.top_k(jax.nn.softmax(cls_preds.reshape(-1, 4, buckets), axis=2), 2)
    extent = jnp.stack([width, width, height, height], axis=1)
    centres = jnp.take_along_axis(jnp.stack(sides, axis=1), labels[..., :1], axis=2)[..., 0]
    offsets = jnp.take_along_axis(offset_preds.reshape(-1, 4, buckets), labels[..., :1], axis=2)[..., 0]
    boxes = (centres - offsets * extent)[:, jnp.array([0, 2, 1, 3])]
    if max_shape is not None:
        last = max_shape[1] - 1, max_shape[0] - 1
        boxes = jnp.clip(boxes, 0, jnp.array(last + last))
    neighbours = jnp.abs(labels[..., 0] - labels[..., 1]) == 1
    return boxes, (scores[..., 0] + scores[..., 1] * neighbours).mean(axis=1)
