"""Functions of kinds that compilers fail on, each with arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout

Arguments = tuple[Any, ...]
BREAKING: dict[str, tuple[Callable[..., Any], Arguments]] = {}


def breaking(*args: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        BREAKING[function.__name__] = function, args
        return function

    return enter


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def boxes(count: int) -> Tensor:
    corner = floats(count, 2).abs() * 20
    return torch.cat([corner, corner + floats(count, 2, seed=1).abs() * 10 + 1], dim=1)


@breaking([floats(3, size, size) for size in (4, 8, 16)])
def loop_over_a_list_of_tensors(levels: list[Tensor]) -> Tensor:
    flat = []
    for level in levels:
        flat.append(level.permute(1, 2, 0).reshape(-1, 3).sigmoid())  # noqa: PERF401 - as people write it
    return torch.cat(flat)


@breaking(floats(8).abs() + 1)
def loop_until_a_value(x: Tensor) -> Tensor:
    while x.sum() > 1:
        x = x / 2
    return x


@breaking(floats(16, 4))
def rows_by_a_mask(x: Tensor) -> Tensor:
    return x[x[:, 0] > 0] * 2


@breaking(floats(8, 4))
def write_into_a_view_of_a_copy(x: Tensor) -> Tensor:
    out = x.clone()
    out[:, 1].mul_(2)
    out[2:4].add_(x[2:4, :1])
    return out


@breaking(boxes(8), 12.0)
def write_into_an_argument(given: Tensor, size: float) -> Tensor:
    given[:, 0::2].clamp_(0, size)
    given[:, 1::2].clamp_(0, size)
    return given[:, 2:] - given[:, :2]


@breaking(floats(8))
def branch_on_a_value(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x * 2
    return x - 1


@breaking(floats(8))
def a_number_out_of_a_tensor(x: Tensor) -> Tensor:
    largest = x.max().item()
    return x / largest + round(largest)


@breaking(torch.tensor([3, 1, 2]), floats(6))
def sizes_out_of_a_tensor(counts: Tensor, x: Tensor) -> list[Tensor]:
    return [part.sum() for part in x.split(counts.tolist())]


@breaking(torch.tensor([3, 1, 3, 3, 2, 1]))
def unique_values(x: Tensor) -> tuple[Tensor, Tensor]:
    values, counts = x.unique(return_counts=True)
    return values, counts


@breaking(boxes(12), floats(12, seed=2))
def greedy_suppression(given: Tensor, scores: Tensor) -> Tensor:
    order = scores.argsort(descending=True).tolist()
    kept: list[int] = []
    while order:
        first = order.pop(0)
        kept.append(first)
        rest = []
        for other in order:
            low = torch.maximum(given[first, :2], given[other, :2])
            high = torch.minimum(given[first, 2:], given[other, 2:])
            if (high - low).clamp(min=0).prod() < 1:
                rest.append(other)
        order = rest
    return torch.tensor(kept)


@breaking({"cls": floats(4, 3), "box": floats(4, 4)}, {"cls": 1.0, "box": 2.0})
def dicts_in_and_out(losses: dict[str, Tensor], weights: dict[str, float]) -> dict[str, Tensor]:
    weighted = {name: loss.abs().mean() * weights[name] for name, loss in losses.items()}
    weighted["total"] = sum(weighted.values(), torch.zeros(()))
    return weighted


@breaking(floats(5, 3))
def through_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2) + 1


@breaking(floats(4, 4))
def an_error_that_is_caught(x: Tensor) -> Tensor:
    try:
        return torch.linalg.cholesky(x)
    except RuntimeError:
        return torch.linalg.cholesky(x @ x.T + 4 * torch.eye(4))


@breaking(floats(64, 64))
def random_zeros(x: Tensor) -> Tensor:
    return dropout(x, 0.5, training=True)


@breaking(torch.tensor([0, 2, 2, 1, 0]), floats(5, 3))
def sums_at_the_same_place(places: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros(3, 3).index_put_((places,), rows, accumulate=True)


@breaking(floats(13))
def a_function_that_calls_itself(x: Tensor) -> Tensor:
    if len(x) == 1:
        return x[0]
    half = len(x) // 2
    return a_function_that_calls_itself(x[:half]) + a_function_that_calls_itself(x[half:])


@breaking(floats(4, 6).t())
def scattered_into_a_transposed_argument(x: Tensor) -> Tensor:
    return x.scatter_(1, torch.tensor([[0], [3], [1], [2], [0], [1]]), 9.0).contiguous().view(-1)


@dataclass(frozen=True)
class Anchors:
    """Anchor boxes of a detector, and the number of boxes on each level of its feature pyramid."""

    boxes: Tensor
    levels: tuple[int, ...]


@breaking(Anchors(boxes(6), (4, 2)))
def an_object_of_the_user(anchors: Anchors) -> list[Tensor]:
    return [part[:, 2:] - part[:, :2] for part in anchors.boxes.split(list(anchors.levels))]
