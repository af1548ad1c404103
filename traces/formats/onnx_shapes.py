"""Operators of aten for ONNX's operators that move, select and repeat elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from opgrip.traces.formats.onnx_nodes import Call, Node, NoOperator, call

Lower = Callable[[Node], list[Call]]

FAR = 1 << 62
"""Ends of slices beyond this are ends of the dimension."""


def _view(node: Node) -> list[Call]:
    if prod(node.x.shape) != prod(node.out.shape):
        raise NoOperator("shapes of different numbers of elements")
    return call(node, "view.default", node.x, list(node.out.shape))


def _squeeze(node: Node) -> list[Call]:
    axes = node.whole("axes", 1)
    if axes is None:
        return call(node, "squeeze.default", node.x)
    return call(node, "squeeze.dims", node.x, axes)


def _unsqueeze(node: Node) -> list[Call]:
    axes = node.whole("axes", 1)
    if axes is not None and len(axes) == 1:
        return call(node, "unsqueeze.default", node.x, axes[0])
    return _view(node)


def _transpose(node: Node) -> list[Call]:
    return call(node, "permute.default", node.x, node.get("perm", list(reversed(range(node.rank)))))


def _concat(node: Node) -> list[Call]:
    parts = [node.input(place) for place in range(len(node.inputs))]
    return call(node, "cat.default", parts, node.axis(0))


def _split(node: Node) -> list[Call]:
    axis = node.axis(0)
    pieces = [item for item in node.outputs if item is not None]
    if len(pieces) != len(node.outputs):
        raise NoOperator("nobody takes some of its pieces")
    sizes = [item.shape[axis] for item in pieces]
    return call(node, "split_with_sizes.default", node.x, sizes, axis, outputs=pieces)


def _slice(node: Node) -> list[Call]:
    starts, ends = node.whole("starts", 1), node.whole("ends", 2)
    if starts is None or ends is None:
        raise NoOperator("it lacks its ends")
    axes = node.whole("axes", 3) or list(range(len(starts)))
    steps = node.whole("steps", 4) or [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or not starts:
        raise NoOperator("ends that cannot be read")
    calls: list[Call] = []
    x = node.x
    for place, (start, end, axis, step) in enumerate(zip(starts, ends, axes, steps, strict=True)):
        if step < 1 or not -node.rank <= axis < node.rank:
            raise NoOperator("torch's operator steps forward")
        size = x.shape[axis]
        shape = list(x.shape)
        shape[axis] = len(range(*slice(start, end, step).indices(size)))
        result = node.out if place == len(starts) - 1 else node.step(tuple(shape))
        last = min(end, FAR)
        args = (x, axis, max(start, -FAR), last, *([step] if step != 1 else []))
        calls.append(Call("slice.Tensor", args, result, {}))
        x = result
    return calls


def _gather(node: Node) -> list[Call]:
    index, axis = node.input(1), node.axis(0)
    values = node.constants[1]
    if not index.shape and values is not None and len(values) == 1:
        return call(node, "select.int", node.x, axis, values[0])
    if axis == 0 and node.rank == 2 and values is None:
        return call(node, "embedding.default", node.x, index)
    if len(index.shape) == 1:
        return call(node, "index_select.default", node.x, axis, index)
    return call(node, "index.Tensor", node.x, [*[None] * axis, index])


def _gather_elements(node: Node) -> list[Call]:
    return call(node, "gather.default", node.x, node.axis(0), node.input(1))


def _scatter_elements(node: Node) -> list[Call]:
    reductions = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    reduction = node.get("reduction", "none")
    args = (node.x, node.axis(0), node.input(1), node.input(2))
    if reduction == "none":
        return call(node, "scatter.src", *args)
    if reduction not in reductions:
        raise NoOperator("a reduction that torch has not")
    return call(node, "scatter_reduce.two", *args, reductions[reduction])


def _expand(node: Node) -> list[Call]:
    return call(node, "expand.default", node.x, list(node.out.shape))


def _tile(node: Node) -> list[Call]:
    repeats = node.whole("repeats", 1)
    if repeats is None or len(repeats) != node.rank or min(repeats, default=0) < 0:
        raise NoOperator("it lacks its repeats")
    return call(node, "repeat.default", node.x, repeats)


def _pad(node: Node) -> list[Call]:
    pads = node.whole("pads", 1) or []
    axes = node.whole("axes", 3) if node.has(3) else None
    places = [axis % max(node.rank, 1) for axis in axes] if axes is not None else list(range(node.rank))
    if len(pads) != 2 * len(places):
        raise NoOperator("pads that cannot be read")
    amounts = {axis: (pads[item], pads[item + len(places)]) for item, axis in enumerate(places)}
    last_first = [amounts.get(axis, (0, 0)) for axis in reversed(range(node.rank))]
    while last_first and last_first[-1] == (0, 0):
        last_first.pop()
    flat = [amount for pair in last_first for amount in pair]
    mode = node.get("mode", "constant")
    if mode == "constant":
        values = node.numbers("value", 2) or [0]
        return call(node, "constant_pad_nd.default", node.x, flat, values[0])
    names = {"reflect": "reflection", "edge": "replication"}
    if mode not in names or len(last_first) not in (1, 2, 3) or min(flat) < 0:
        raise NoOperator("torch's operator pads one to three dimensions")
    return call(node, f"{names[mode]}_pad{len(last_first)}d.default", node.x, flat)


def _resize(node: Node) -> list[Call]:
    mode, count = node.get("mode", "nearest"), node.rank - 2
    if count not in (1, 2, 3) or node.out.shape[:2] != node.x.shape[:2]:
        raise NoOperator("torch's operator resizes one to three dimensions after batch and channels")
    sizes = list(node.out.shape[2:])
    if mode == "nearest":
        return call(node, f"upsample_nearest{count}d.default", node.x, sizes)
    corners = node.get("coordinate_transformation_mode", "half_pixel") == "align_corners"
    names = {
        ("linear", 1): "upsample_linear1d",
        ("linear", 2): "upsample_bilinear2d",
        ("linear", 3): "upsample_trilinear3d",
        ("cubic", 2): "upsample_bicubic2d",
    }
    if (mode, count) not in names:
        raise NoOperator(f"torch has no {mode} mode of {count} dimensions"[:80])
    return call(node, f"{names[mode, count]}.default", node.x, sizes, corners)


def _depth_to_space(node: Node) -> list[Call]:
    if node.get("mode", "DCR") != "CRD":
        raise NoOperator("torch's operator has the other order of channels")
    return call(node, "pixel_shuffle.default", node.x, int(node.get("blocksize", 1)))


def _non_zero(node: Node) -> list[Call]:
    columns, rows = node.out.shape
    # ONNX has a row for each dimension, torch a column
    found = replace(node.out, shape=(rows, columns), stride=(columns, 1), storage=node.between())
    return [Call("nonzero.default", (node.x,), found, {}), Call("t.default", (found,), node.out, {})]


def _shape(node: Node) -> list[Call]:
    start, end = node.get("start", 0), node.get("end", node.rank)
    if (start, end) == (0, node.rank):
        return call(node, "_shape_as_tensor.default", node.x)
    sizes = node.step((node.rank,), node.out.dtype)
    whole = Call("_shape_as_tensor.default", (node.x,), sizes, {})
    return [whole, Call("slice.Tensor", (sizes, 0, start, end), node.out, {})]


SHAPES: dict[str, Lower] = {
    "Concat": _concat,
    "DepthToSpace": _depth_to_space,
    "Expand": _expand,
    "Flatten": _view,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "NonZero": _non_zero,
    "Pad": _pad,
    "Reshape": _view,
    "Resize": _resize,
    "ScatterElements": _scatter_elements,
    "Shape": _shape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Upsample": _resize,
}
