import jax.numpy as jnp
from jax import Array


def yolo_encode(bboxes: Array, gt_bboxes: Array, stride: Array | int, eps: float = 1e-6) -> Array:
    cell = jnp.asarray(stride)[..., None]
    centre = (bboxes[..., :2] + bboxes[..., 2:]) / 2
    gt_centre = (gt_bboxes[..., :2] + gt_bboxes[..., 2:]) / 2
    shift = jnp.clip((gt_centre - centre) / cell + 0.5, eps, 1 - eps)
    ratio = (gt_bboxes[..., 2:] - gt_bboxes[..., :2]) / (bboxes[..., 2:] - bboxes[..., :2])
    return jnp.concatenate([shift, jnp.log(jnp.maximum(ratio, eps))], axis=-1)
