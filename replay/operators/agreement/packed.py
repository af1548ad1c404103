"""Weights of few bits, which lie in rows with their scales."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from opgrip.replay.operators.agreement.layers import Call, Sizes, elements, is_tensor, shape_of, shapes


def matmul_int4(call: Call) -> Iterator[Sizes]:
    """A matrix by one of 4 bits, scaled in groups along what is summed."""
    inner, group = shape_of(call["self"])[-1], call["qGroupSize"]
    columns = shape_of(call["mat2"])[0]
    yield "qGroupSize in that of self", inner % group if group > 0 else None, 0
    yield from elements(call, columns * inner // 2, "mat2")
    yield from shapes(call, (inner // group, columns, 2), "qScaleAndZeros")


def matmul_4bit(call: Call) -> Iterator[Sizes]:
    """Rows by a matrix of 4 bits, packed with its scales, and with a bias or none."""
    block, inner, columns = call["block_size"], call["in_features"], call["out_features"]
    weight = call["packed_weights"]
    yield "sizes of inp but the first", shape_of(call["inp"])[1:], (inner,)
    yield "numbers above 0", min(block, inner, columns) > 0, True
    yield "block_size in in_features", inner % block, 0
    scales = 0 if weight.dtype == torch.uint8 else columns * (inner // block)
    yield "packed_weights enough", prod(shape_of(weight)) >= columns * inner // 2 + scales, True


def bag(call: Call) -> Iterator[Sizes]:
    """Sums, means or maxima of rows of a table."""
    yield "any bags for what there is", prod(shape_of(call["offsets"])) > 0 or not prod(shape_of(call["indices"])), True


def bag_of_rows(call: Call) -> Iterator[Sizes]:
    """Rows of a packed table, with a weight for each place."""
    yield from shapes(call, shape_of(call["indices"]), "per_sample_weights")


def bag_gradient(call: Call) -> Iterator[Sizes]:
    """The backward of sums, means or maxima of rows of a table."""
    indices, grad = shape_of(call["indices"]), shape_of(call["grad"])
    yield "dimensions of grad", len(grad), 2
    rows, table = grad[0], call["num_weights"] if "num_weights" in call else shape_of(call["weight"])[0]
    yield "rows of the table, any", table > 0 or not prod(indices), True
    for name in ("indices", "offsets", "offset2bag"):
        if is_tensor(call.get(name)):
            yield f"whole numbers of {name}", call[name].dtype in (torch.int32, torch.int64), True
    yield from elements(call, rows, "bag_size")
    yield from shapes(call, indices, "per_sample_weights")
    places = shape_of(call["offset2bag"])
    yield "offset2bag", places, indices if prod(places) else places
    if is_tensor(call.get("offsets")):
        offsets = prod(shape_of(call["offsets"]))
        yield "offsets", offsets, offsets if offsets - rows in (0, 1) else rows
    if call.get("mode") == 2 and is_tensor(call.get("maximum_indices")):
        yield from shapes(call, grad, "maximum_indices")
    if is_tensor(call.get("weight")):
        yield "grad", grad[1:], shape_of(call["weight"])[1:]


def numbered(call: Call) -> Iterator[Sizes]:
    """As many elements as are said to be there."""
    yield "numel", call["numel"], min(max(call["numel"], 0), prod(shape_of(call["input"])))


def observed(call: Call) -> Iterator[Sizes]:
    """Scales for each channel or for all; ranges may not be there yet."""
    count = shape_of(call["self"])[call["ch_axis"]] if call["per_row_fake_quant"] else 1
    yield from elements(call, count, "scale", "zero_point")
    for name in ("running_min", "running_max"):
        if prod(shape_of(call[name])):
            yield from elements(call, count, name)
    yield from elements(call, 1, "observer_on", "fake_quant_on")
