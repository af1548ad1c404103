"""Normalizations and resizing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import isfinite, prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.replay.operators.agreement.layers import Call, Sizes, elements, is_tensor, own_memory, shape_of, shapes


def upsample(call: Call) -> Iterator[Sizes]:
    """Scales by which the output is about as large as it is, in as many dimensions as it has."""
    if "output_size" not in call or "input" in call:
        # this overload computes the one from the other
        return
    input_size = tuple(call["input_size"]) if "input_size" in call else shape_of(call["self"])
    output_size = tuple(call["output_size"])
    yield "input", len(input_size), len(output_size) + 2
    yield from shapes(call, (*input_size[:2], *output_size), "grad_output")
    names = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}[len(output_size)]
    for name, before, after in zip(names, input_size[2:], output_size, strict=True):
        scale = call.get(name)
        if scale is not None and not (isfinite(scale) and scale > 0 and abs(before * scale - after) <= 1):
            yield name, scale, f"about {after}/{before}"


def batch_norm(call: Call) -> Iterator[Sizes]:
    """Statistics and weights of channels."""
    shape = shape_of(call["input"])
    channels = shape[1]
    yield from elements(call, channels, "weight", "bias", "running_mean", "running_var", "mean", "invstd")
    yield from shapes(call, shape, "grad_out", "grad_output")
    trains = call.get("train", call.get("training", call.get("update", True)))
    for name in ("save_mean", "save_invstd", "save_var"):
        # evaluation keeps none
        if trains or (is_tensor(call.get(name)) and prod(shape_of(call[name]))):
            yield from elements(call, channels, name)


def layer_norm(call: Call) -> Iterator[Sizes]:
    """Weights of the last dimensions, and statistics of the others."""
    shape, normalized = shape_of(call["input"]), tuple(call["normalized_shape"])
    yield "normalized_shape", normalized, shape[len(shape) - len(normalized) :]
    yield from shapes(call, normalized, "weight", "bias")
    yield from shapes(call, shape, "grad_out")
    yield from elements(call, prod(shape[: len(shape) - len(normalized)]), "mean", "rstd")


def group_norm(call: Call) -> Iterator[Sizes]:
    """Weights of channels, and statistics of their groups."""
    batch, channels, groups = call["N"], call["C"], call["group"]
    yield "N, C and HxW", batch * channels * call["HxW"], prod(shape_of(call["input"]))
    yield "C modulo group", channels % groups if groups > 0 else None, 0
    yield from shapes(call, shape_of(call["input"]), "grad_out")
    yield from elements(call, channels, "weight", "bias")
    yield from elements(call, batch * groups, "mean", "rstd")


def group_norm_backward(call: Call) -> Iterator[Sizes]:
    """The same for its backward, some versions of which read gradients in a row."""
    yield from group_norm(call)
    if not _takes_any_strides():
        yield from own_memory("grad_out", "input", "weight", "mean", "rstd")(call)


class _Gradients(TorchDispatchMode):
    """Sees whether the backward of a group norm is called with a gradient that is not contiguous."""

    any_strides: bool = False

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function._schema.name == "aten::native_group_norm_backward":
            self.any_strides |= not args[0].is_contiguous()
        return function(*args, **(kwargs or {}))


@cache
def _takes_any_strides() -> bool:
    """Whether this torch leaves it to the backward of a group norm to lay a gradient in a row, as 2.15 does."""
    # a thread of its own: the caller may be in a dispatch mode, where nothing has gradients
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_sees_any_strides).result()


def _sees_any_strides() -> bool:
    image = torch.zeros(1, 2, 3, requires_grad=True)
    seen = _Gradients()
    with seen:
        torch.nn.functional.group_norm(image, 1).sum().backward()
    return seen.any_strides


def weight_norm(call: Call) -> Iterator[Sizes]:
    """Norms along all dimensions but one."""
    shape = shape_of(call["v"] if "v" in call else call["saved_v"])
    yield from shapes(call, shape, "grad_w")
    yield from elements(call, shape[call.get("dim", 0)], "g", "saved_g", "saved_norms")


def quantized_batch_norm(call: Call) -> Iterator[Sizes]:
    """A batch norm of integers with scales."""
    yield from elements(call, shape_of(call["qx"])[1], "weight", "bias", "mean", "var")
