"""Normalizations."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from opgrip.replay.operators.agreement.sizes import Call, Sizes, elements, is_tensor, shape_of, shapes


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


def weight_norm(call: Call) -> Iterator[Sizes]:
    """Norms along all dimensions but one."""
    shape = shape_of(call["v"] if "v" in call else call["saved_v"])
    yield from shapes(call, shape, "grad_w")
    yield from elements(call, shape[call.get("dim", 0)], "g", "saved_g", "saved_norms")


def quantized_batch_norm(call: Call) -> Iterator[Sizes]:
    """A batch norm of integers with scales."""
    yield from elements(call, shape_of(call["qx"])[1], "weight", "bias", "mean", "var")
