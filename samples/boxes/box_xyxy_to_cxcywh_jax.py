import jax.numpy as jnp
from jax import Array


def box_xyxy_to_cxcywh(boxes: Array) -> Array:
    low, high = boxes[..., :2], boxes[..., 2:]
    return jnp.concatenate([(low + high) / 2, high - low], axis=-1)
