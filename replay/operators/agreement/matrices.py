"""Matrices: their factors, diagonals and rows; and spectra, which have their dimensions by number."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from opgrip.replay.operators.agreement.sizes import Call, Sizes, shape_of, shapes


def pivots(call: Call) -> Iterator[Sizes]:
    """A pivot for each row of the smaller side of each matrix."""
    shape = shape_of(call["LU_data"])
    yield from shapes(call, (*shape[:-2], min(shape[-2:])), "LU_pivots")


def solutions(call: Call) -> Iterator[Sizes]:
    """A factored matrix for each right side."""
    shape, right = shape_of(call["LD"]), shape_of(call["B"])
    yield from shapes(call, shape[:-1], "pivots")
    yield "batch of B with that of LD", tuple(torch.broadcast_shapes(shape[:-2], right[:-2])), shape[:-2]


def diagonals(call: Call) -> Iterator[Sizes]:
    """A matrix made of diagonals."""
    yield "shape with negative sizes", [size for size in call["shape"] if size < 0], []


def compressed_rows(call: Call) -> Iterator[Sizes]:
    """Rows that are counted."""
    yield "size that has places for all", call["size"] > 0 or call["size"] == prod(shape_of(call["self"])) == 0, True


def reduced_products(call: Call) -> Iterator[Sizes]:
    """The backward of a product whose sums are minima, maxima or means."""
    rows, inner = shape_of(call["self"])
    weight = shape_of(call["weight"])
    yield "rows of weight", weight[0], inner
    yield from shapes(call, (rows, weight[1]), "grad_out")
    # sums keep none
    if call["reduce"] in ("amax", "amin"):
        yield from shapes(call, (rows, weight[1]), "arg_out")


def reach(call: Call) -> Iterator[Sizes]:
    """Strides whose products are numbers of 64 bits: torch counts with them where a view ends."""
    last = (call.get("storage_offset") or 0) + sum(
        (size - 1) * stride for size, stride in zip(call["size"], call["stride"], strict=True) if size > 0
    )
    yield f"places up to {last}", abs(last) < 2**59, True


def dimensions(call: Call) -> Iterator[Sizes]:
    """Dimensions that there are, each once."""
    count = len(shape_of(call["self"]))
    yield f"dimensions from {-count} to {count - 1}", all(-count <= dim < count for dim in call["dim"]), True
    yield "different dimensions", len({dim % count for dim in call["dim"]}) if count else 0, len(call["dim"])


def half_spectrum(call: Call) -> Iterator[Sizes]:
    """As much of the last dimension as is not its mirror image."""
    yield from dimensions(call)
    shape = shape_of(call["self"])
    yield "last_dim_size above 0", call["last_dim_size"] > 0, True
    if call["dim"]:
        yield "size of the last dimension", shape[call["dim"][-1]], call["last_dim_size"] // 2 + 1


def padded_rows(call: Call) -> Iterator[Sizes]:
    """A row of sizes for each nested tensor."""
    padded = shape_of(call["padded"])
    yield from shapes(call, (padded[0], len(padded) - 1), "cpu_nested_shape_example")


def classes(call: Call) -> Iterator[Sizes]:
    """The backward of a loss by classes, of which there are some."""
    shape = shape_of(call["self"])
    yield "classes", shape[1 if len(shape) > 1 else 0] > 0 or not prod(shape_of(call["target"])), True


def noise(call: Call) -> Iterator[Sizes]:
    """Noise for each element, which is written or read as they are."""
    yield from shapes(call, shape_of(call["self"]), "noise", "grad_output")
    yield "dtype of noise", call["noise"].dtype, call["self"].dtype


def margins(call: Call) -> Iterator[Sizes]:
    """The backward of a loss over classes: one gradient, or one for each target."""
    shape = shape_of(call["self"])
    samples = shape[0] if len(shape) > 1 else 1
    yield "elements of target", prod(shape_of(call["target"])), samples
    yield "elements of grad_output", prod(shape_of(call["grad_output"])), samples if call["reduction"] == 0 else 1
    yield from shapes(call, shape[-1:], "weight")
