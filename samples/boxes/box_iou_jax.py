import jax.numpy as jnp
from jax import Array

from opgrip.samples.boxes.box_area_jax import area_between, box_area


def box_iou(first: Array, second: Array) -> tuple[Array, Array]:
    first, second = first[..., :, None, :], second[..., None, :, :]
    low = jnp.maximum(first[..., :2], second[..., :2])
    high = jnp.minimum(first[..., 2:], second[..., 2:])
    shared = area_between(low, high)
    union = box_area(first) + box_area(second) - shared
    return shared / union, union
