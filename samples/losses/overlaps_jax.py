import jax.numpy as jnp
from jax import Array


def area(boxes: Array) -> Array:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def shared_area(boxes: Array, others: Array) -> Array:
    """Return the areas of the intersections, (N,)."""
    corner = jnp.maximum(boxes[:, :2], others[:, :2])
    extent = jnp.maximum(jnp.minimum(boxes[:, 2:], others[:, 2:]) - corner, 0)
    return extent[:, 0] * extent[:, 1]


def overlap_ratio(boxes: Array, others: Array, eps: float) -> Array:
    """Return intersection over union, (N,) float, of pairs of boxes; eps is added to the union."""
    shared = shared_area(boxes, others)
    return shared / (area(boxes) + area(others) - shared + eps)


def enclosing_size(boxes: Array, others: Array) -> Array:
    """Return the widths and heights of the enclosing boxes, (N, 2)."""
    corner = jnp.minimum(boxes[:, :2], others[:, :2])
    return jnp.maximum(jnp.maximum(boxes[:, 2:], others[:, 2:]) - corner, 0)


def centre_distance(boxes: Array, others: Array, eps: float) -> Array:
    """Return squared distances of the centres, divided by the squared diagonal of the enclosing box, (N,)."""
    shift = (others[:, :2] + others[:, 2:] - boxes[:, :2] - boxes[:, 2:]) / 2
    return (shift**2).sum(axis=1) / ((enclosing_size(boxes, others) ** 2).sum(axis=1) + eps)
