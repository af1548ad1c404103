import jax.numpy as jnp
from jax import Array


def area(boxes: Array) -> Array:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def shared_area(boxes: Array, others: Array) -> Array:
    """Return the areas, (N,) float, of the intersections of pairs of boxes, one from `boxes` and one from `others`,
    both (N, 4) float, x1 y1 x2 y2.
    """
    corner = jnp.maximum(boxes[:, :2], others[:, :2])
    extent = jnp.maximum(jnp.minimum(boxes[:, 2:], others[:, 2:]) - corner, 0)
    return extent[:, 0] * extent[:, 1]


def overlap_ratio(boxes: Array, others: Array, eps: float) -> Array:
    """Return intersection over union, (N,) float, of pairs of boxes, both (N, 4) float; `eps` is added to the union."""
    shared = shared_area(boxes, others)
    return shared / (area(boxes) + area(others) - shared + eps)


def enclosing_size(boxes: Array, others: Array) -> Array:
    """Return width and height, (N, 2) float, of the boxes around pairs of boxes, both (N, 4) float, x1 y1 x2 y2."""
    corner = jnp.minimum(boxes[:, :2], others[:, :2])
    return jnp.maximum(jnp.maximum(boxes[:, 2:], others[:, 2:]) - corner, 0)


def centre_distance(boxes: Array, others: Array, eps: float) -> Array:
    """Return squared distances, (N,) float, of the centres of pairs of boxes, divided by the squared diagonal of the
    box around both.

    eps : added to the squared diagonal
    """
    shift = (others[:, :2] + others[:, 2:] - boxes[:, :2] - boxes[:, 2:]) / 2
    return (shift**2).sum(axis=1) / ((enclosing_size(boxes, others) ** 2).sum(axis=1) + eps)
