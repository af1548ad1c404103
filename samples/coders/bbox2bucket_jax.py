import jax
import jax.numpy as jnp
from jax import Array

from opgrip.samples.coders.generate_buckets_jax import generate_buckets


def bbox2bucket(
    proposals: Array,
    gt: Array,
    num_buckets: int,
    scale_factor: float,
    offset_topk: int = 2,
    offset_upperbound: float = 1.0,
    cls_ignore_neighbor: bool = True,
) -> tuple[Array, Array, Array, Array]:
    width, height, *sides = generate_buckets(proposals, num_buckets, scale_factor)
    centres = jnp.stack(sides, axis=1)
    extent = jnp.stack([width, width, height, height], axis=1)
    offsets = (centres - gt[:, jnp.array([0, 2, 1, 3]), None]) / extent[:, :, None]
    negated, nearest = jax.lax.top_k(-jnp.abs(offsets), offset_topk)
    chosen = jax.nn.one_hot(nearest, centres.shape[2], dtype=offsets.dtype)
    learned = (-negated < offset_upperbound).astype(offsets.dtype).at[..., 0].set(1.0)
    weights = (chosen * learned[..., None]).sum(axis=2)
    labels = chosen[:, :, 0]
    ignored = (jnp.abs(offsets) < 1) & (labels == 0) & cls_ignore_neighbor
    flat = (len(proposals), -1)
    return offsets.reshape(flat), weights.reshape(flat), labels.reshape(flat), (~ignored).reshape(flat).astype(gt.dtype)
