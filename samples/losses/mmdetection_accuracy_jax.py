import jax
import jax.numpy as jnp
from jax import Array


def mmdetection_accuracy(
    scores: Array, labels: Array, topk: int | tuple[int, ...] = 1, thresh: float | None = None
) -> Array | list[Array]:
    numbers = (topk,) if isinstance(topk, int) else topk
    if len(scores) == 0:
        accuracies = [jnp.zeros((), scores.dtype) for _ in numbers]
    else:
        best, classes = jax.lax.top_k(scores, max(numbers))
        right = classes == labels[:, None]
        if thresh is not None:
            right = right & (best > thresh)
        accuracies = [right[:, :number].sum(dtype=scores.dtype)[None] * (100.0 / len(scores)) for number in numbers]
    return accuracies[0] if isinstance(topk, int) else accuracies
