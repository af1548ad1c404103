import jax.numpy as jnp
from jax import Array


def box_cxcywh_to_xyxy(boxes: Array) -> Array:
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return jnp.concatenate([centre - half, centre + half], axis=-1)
