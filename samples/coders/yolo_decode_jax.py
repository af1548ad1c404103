import jax.numpy as jnp
from jax import Array


def yolo_decode(bboxes: Array, pred_bboxes: Array, stride: Array | int) -> Array:
    centre = (bboxes[..., :2] + bboxes[..., 2:]) / 2 + (pred_bboxes[..., :2] - 0.5) * stride
    half = (bboxes[..., 2:] - bboxes[..., :2]) / 2 * jnp.exp(pred_bboxes[..., 2:])
    return jnp.concatenate([centre - half, centre + half], axis=-1)
