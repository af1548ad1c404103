"""Conversion of each ONNX operator to the aten operators that compute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch

from opgrip.traces.formats.building import NOT_RECORDED
from opgrip.traces.formats.onnx.nodes import NoOperator, OnnxCall, OnnxNode, call, transposed
from opgrip.traces.schema.arguments import TensorSpec

Lower = Callable[[OnnxNode], list[OnnxCall]]


def _padding(node: OnnxNode, kernel: list[int], stride: list[int], dilation: list[int]) -> tuple[list[int], list[int]]:
    count = len(kernel)
    mode = node.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        pads = node.get("pads", [0] * 2 * count)
        if len(pads) != 2 * count or min(pads) < 0:
            raise NoOperator("its pads are not two non-negative numbers for each dimension")
        return pads[:count], pads[count:]
    if mode == "VALID":
        return [0] * count, [0] * count
    begins, ends = [], []
    for size, width, step, gap in zip(node.x.shape[2:], kernel, stride, dilation, strict=True):
        if step < 1:
            raise NoOperator(f"one of its strides is less than 1: {stride}")
        total = max((-(-size // step) - 1) * step + (width - 1) * gap + 1 - size, 0)
        less, more = total // 2, total - total // 2
        begins.append(less if mode == "SAME_UPPER" else more)
        ends.append(more if mode == "SAME_UPPER" else less)
    return begins, ends


def _padded(
    node: OnnxNode, begins: list[int], ends: list[int], value: float
) -> tuple[list[OnnxCall], TensorSpec, list[int]]:
    if begins == ends:
        return [], node.x, begins
    sizes = (size + before + after for size, before, after in zip(node.x.shape[2:], begins, ends, strict=True))
    result = node.step((*node.x.shape[:2], *sizes))
    pads = [amount for pair in reversed(list(zip(begins, ends, strict=True))) for amount in pair]
    return [OnnxCall("constant_pad_nd.default", (node.x, pads, value), result, {})], result, [0] * len(begins)


def _conv(node: OnnxNode) -> list[OnnxCall]:
    weight, bias = node.input(1), node.optional(2)
    stride, dilation = node.spatial("strides", 1), node.spatial("dilations", 1)
    pads = _padding(node, list(weight.shape[2:]), stride, dilation)
    calls, x, padding = _padded(node, *pads, 0.0)
    zero = [0] * len(stride)
    args = (x, weight, bias, stride, padding, dilation, False, zero, int(node.get("group", 1)))
    return [*calls, OnnxCall("convolution.default", args, node.out, {})]


def _conv_transpose(node: OnnxNode) -> list[OnnxCall]:
    weight, bias = node.input(1), node.optional(2)
    stride, dilation = node.spatial("strides", 1), node.spatial("dilations", 1)
    output = node.spatial("output_padding", 0)
    if "output_shape" in node.attributes or node.get("auto_pad", "NOTSET") not in ("NOTSET", ""):
        raise NoOperator("torch's operator does not take an output shape")
    begins, ends = _padding(node, list(weight.shape[2:]), stride, dilation)
    if begins != ends:
        raise NoOperator("it crops its two sides by different amounts, which torch's operator cannot do")
    args = (node.x, weight, bias, stride, begins, dilation, True, output, int(node.get("group", 1)))
    return call(node, "convolution.default", *args)


def _max_pool(node: OnnxNode) -> list[OnnxCall]:
    kernel, stride = node.spatial("kernel_shape", 1), node.spatial("strides", 1)
    dilation, ceil = node.spatial("dilations", 1), bool(node.get("ceil_mode", 0))
    calls, x, padding = _padded(node, *_padding(node, kernel, stride, dilation), float("-inf"))
    if any(2 * pad > width for pad, width in zip(padding, kernel, strict=True)):
        raise NoOperator(f"its padding {padding} is more than half of the window {kernel}")
    args = (x, kernel, stride, padding, dilation, ceil)
    if len(kernel) == 1:
        return [*calls, OnnxCall("max_pool1d.default", args, node.out, {})]
    indices = node.outputs[1] if len(node.outputs) > 1 else None
    if indices is None:
        indices = replace(node.out, dtype=torch.int64, storage=node.between())
    return [*calls, OnnxCall(f"max_pool{len(kernel)}d_with_indices.default", args, (node.out, indices), {})]


def _average_pool(node: OnnxNode) -> list[OnnxCall]:
    kernel, stride = node.spatial("kernel_shape", 1), node.spatial("strides", 1)
    dilation = node.spatial("dilations", 1)
    begins, ends = _padding(node, kernel, stride, dilation)
    include = bool(node.get("count_include_pad", 0))
    if set(dilation) != {1} or (begins != ends and not include):
        raise NoOperator("torch's operator has no dilation and pads both sides by the same amount")
    calls, x, padding = _padded(node, begins, ends, 0.0)
    args = (x, kernel, stride, padding, bool(node.get("ceil_mode", 0)), include)
    return [*calls, OnnxCall(f"avg_pool{len(kernel)}d.default", args, node.out, {})]


def _global(op: str) -> Lower:
    return lambda node: call(node, op, node.x, list(range(2, node.rank)), True)


def _matmul(node: OnnxNode) -> list[OnnxCall]:
    left, right = node.x, node.input(1)
    ranks = len(left.shape), len(right.shape)
    same_batch = left.shape[:-2] == right.shape[:-2]
    if ranks == (2, 2):
        return call(node, "mm.default", left, right)
    if ranks == (3, 3) and same_batch:
        return call(node, "bmm.default", left, right)
    return call(node, "matmul.default", left, right)


def _gemm(node: OnnxNode) -> list[OnnxCall]:
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    left = transposed(node.x) if node.get("transA", 0) else node.x
    right = transposed(node.input(1)) if node.get("transB", 0) else node.input(1)
    scales = {name: value for name, value in (("beta", beta), ("alpha", alpha)) if value != 1.0}
    if node.has(2):
        return call(node, "addmm.default", node.input(2), left, right, **scales)
    if alpha == 1.0:
        return call(node, "mm.default", left, right)
    product = node.step(node.out.shape)
    calls = [OnnxCall("mm.default", (left, right), product, {})]
    return [*calls, OnnxCall("mul.Scalar", (product, alpha), node.out, {})]


def _batch_norm(node: OnnxNode) -> list[OnnxCall]:
    if node.get("training_mode", 0):
        raise NoOperator("unsupported: training mode")
    scale, bias, mean, variance = (node.input(index) for index in range(1, 5))
    settings = (False, node.get("momentum", 0.9), node.get("epsilon", 1e-5))
    outputs = (node.out, NOT_RECORDED, NOT_RECORDED)
    return call(node, "native_batch_norm.default", node.x, scale, bias, mean, variance, *settings, outputs=outputs)


def _layer_norm(node: OnnxNode) -> list[OnnxCall]:
    shape = list(node.x.shape[node.axis(-1) :])
    args = (node.x, shape, node.optional(1), node.optional(2), node.get("epsilon", 1e-5))
    return call(node, "native_layer_norm.default", *args, outputs=(node.out, NOT_RECORDED, NOT_RECORDED))


def _rms_norm(node: OnnxNode) -> list[OnnxCall]:
    shape = list(node.x.shape[node.axis(-1) :])
    return call(node, "rms_norm.default", node.x, shape, node.optional(1), node.get("epsilon", 1e-5))


def _instance_norm(node: OnnxNode) -> list[OnnxCall]:
    scales = (node.input(1), node.input(2), None, None)
    return call(node, "instance_norm.default", node.x, *scales, True, 0.0, node.get("epsilon", 1e-5), False)


def _group_norm(node: OnnxNode) -> list[OnnxCall]:
    batch, channels = node.x.shape[:2]
    groups = int(node.get("num_groups", 1))
    if node.input(1).shape != (channels,):
        raise NoOperator("torch's operator needs one scale per channel")
    args = (node.x, node.input(1), node.input(2), batch, channels, prod(node.x.shape[2:]), groups)
    outputs = (node.out, NOT_RECORDED, NOT_RECORDED)
    return call(node, "native_group_norm.default", *args, node.get("epsilon", 1e-5), outputs=outputs)


def _attention(node: OnnxNode) -> list[OnnxCall]:
    query, key, value = (node.input(index) for index in range(3))
    is_plain = len(query.shape) == len(key.shape) == len(value.shape) == 4 and not any(map(node.has, range(4, 7)))
    if not is_plain or node.get("softcap", 0.0):
        raise NoOperator(
            "torch's attention operator needs a dimension for the heads, and takes neither a cache nor a softcap"
        )
    grouped = query.shape[1] != key.shape[1]
    scale = node.attributes.get("scale")
    settings = {"scale": scale, "enable_gqa": True if grouped else None}
    kwargs = {name: setting for name, setting in settings.items() if setting is not None}
    args = (query, key, value, node.optional(3), 0.0, bool(node.get("is_causal", 0)))
    return call(node, "scaled_dot_product_attention.default", *args, **kwargs)


def _grid_sample(node: OnnxNode) -> list[OnnxCall]:
    modes = {"bilinear": 0, "linear": 0, "nearest": 1, "bicubic": 2, "cubic": 2}
    paddings = {"zeros": 0, "border": 1, "reflection": 2}
    mode, padding = node.get("mode", "linear"), node.get("padding_mode", "zeros")
    if node.rank not in (4, 5) or mode not in modes or padding not in paddings:
        raise NoOperator("torch's grid_sampler does not support this combination of mode, padding and dimensions")
    settings = (modes[mode], paddings[padding], bool(node.get("align_corners", 0)))
    return call(node, f"grid_sampler_{node.rank - 2}d.default", node.x, node.input(1), *settings)


def _resize(node: OnnxNode) -> list[OnnxCall]:
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
        raise NoOperator(f"torch cannot resize {count} dimensions in the mode {mode}"[:80])
    return call(node, f"{names[mode, count]}.default", node.x, sizes, corners)


LAYERS: dict[str, Lower] = {
    "Attention": _attention,
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "GlobalAveragePool": _global("mean.dim"),
    "GlobalMaxPool": _global("amax.default"),
    "GridSample": _grid_sample,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "MatMul": _matmul,
    "MaxPool": _max_pool,
    "RMSNormalization": _rms_norm,
    "Resize": _resize,
    "Upsample": _resize,
}


_SAME_NAME = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "IsInf"),
    *("IsNaN", "Log", "Mish", "Neg", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Sinh"),
    *("HardSwish", "Softplus", "Sqrt", "Tan", "Tanh"),
)
UNARY = {
    **{name: name.lower() for name in _SAME_NAME},
    "BitwiseNot": "bitwise_not",
    "Identity": "alias",
    "Not": "logical_not",
    "Swish": "silu",
}
BINARY = {
    "Add": "add.Tensor",
    "And": "logical_and.default",
    "BitwiseAnd": "bitwise_and.Tensor",
    "BitwiseOr": "bitwise_or.Tensor",
    "BitwiseXor": "bitwise_xor.Tensor",
    "Equal": "eq.Tensor",
    "Greater": "gt.Tensor",
    "GreaterOrEqual": "ge.Tensor",
    "Less": "lt.Tensor",
    "LessOrEqual": "le.Tensor",
    "Mul": "mul.Tensor",
    "Or": "logical_or.default",
    "Sub": "sub.Tensor",
    "Xor": "logical_xor.default",
}
# operators on any number of inputs, applied to two inputs at a time
OF_ALL = {"Max": "maximum.default", "Min": "minimum.default", "Sum": "add.Tensor"}
REDUCTIONS = {
    "ReduceL1": ("linalg_vector_norm.default", (1,)),
    "ReduceL2": ("linalg_vector_norm.default", (2,)),
    "ReduceLogSumExp": ("logsumexp.default", ()),
    "ReduceMax": ("amax.default", ()),
    "ReduceMean": ("mean.dim", ()),
    "ReduceMin": ("amin.default", ()),
    "ReduceSum": ("sum.dim_IntList", ()),
}
MODULO = {False: "remainder.Tensor", True: "fmod.Tensor"}
# reasons why nodes of some ONNX operators are not converted
REASONS = {
    "If": "unsupported: data-dependent control flow",
    "Loop": "unsupported: data-dependent number of iterations",
    "Scan": "unsupported: data-dependent number of iterations",
    "Size": "torch represents sizes without an operator",
    **dict.fromkeys(("GRU", "LSTM", "RNN"), "torch's operator takes the weights in another form"),
}


def check_operator(op: str) -> None:
    if op not in TABLE:
        raise NoOperator(REASONS.get(op, "no aten operator for it"))


def _unary(op: str) -> Lower:
    return lambda node: call(node, f"{op}.default", node.x)


def _binary(op: str) -> Lower:
    return lambda node: call(node, op, node.x, node.input(1))


def _of_all(op: str) -> Lower:
    def lower_all(node: OnnxNode) -> list[OnnxCall]:
        first, *others = node.all_inputs()
        if not others:
            return call(node, "alias.default", first)
        calls: list[OnnxCall] = []
        for index, other in enumerate(others):
            is_last = index == len(others) - 1
            shape = tuple(torch.broadcast_shapes(first.shape, other.shape))
            result = node.out if is_last else node.step(shape)
            calls.append(OnnxCall(op, (first, other), result, {}))
            first = result
        return calls

    return lower_all


def _reduction(op: str, before: tuple[Any, ...]) -> Lower:
    def reduce(node: OnnxNode) -> list[OnnxCall]:
        axes = node.whole("axes", 1)
        if not axes and node.get("noop_with_empty_axes", 0):
            return call(node, "alias.default", node.x)
        dims = [axis % max(node.rank, 1) for axis in axes] if axes else list(range(node.rank))
        return call(node, op, node.x, *before, dims, node.keeps_dimensions)

    return reduce


def _prod(node: OnnxNode) -> list[OnnxCall]:
    axes = node.whole("axes", 1)
    if not axes or len(axes) != 1:
        raise NoOperator("unsupported: product over several dimensions")
    return call(node, "prod.dim_int", node.x, axes[0], node.keeps_dimensions)


def _div(node: OnnxNode) -> list[OnnxCall]:
    if node.x.dtype.is_floating_point:
        return call(node, "div.Tensor", node.x, node.input(1))
    return call(node, "div.Tensor_mode", node.x, node.input(1), rounding_mode="trunc")


def _pow(node: OnnxNode) -> list[OnnxCall]:
    values = node.constants[1] if len(node.constants) > 1 else None
    if values is not None and len(values) == 1 and isinstance(values[0], int | float):
        return call(node, "pow.Tensor_Scalar", node.x, values[0])
    return call(node, "pow.Tensor_Tensor", node.x, node.input(1))


def _clip(node: OnnxNode) -> list[OnnxCall]:
    bounds = [node.numbers(name, index) for index, name in ((1, "min"), (2, "max"))]
    if not any(bounds):
        return call(node, "alias.default", node.x)
    return call(node, "clamp.default", node.x, *(bound[0] if bound else None for bound in bounds))


def _lower_with(op: str, *attributes: tuple[str, float]) -> Lower:
    return lambda node: call(node, op, node.x, *(node.get(name, default) for name, default in attributes))


def _hard_sigmoid(node: OnnxNode) -> list[OnnxCall]:
    alpha, beta = node.get("alpha", 0.2), node.get("beta", 0.5)
    if abs(alpha - 1 / 6) > 1e-6 or beta != 0.5:
        raise NoOperator(f"torch's operator has alpha=1/6 and beta=0.5, the node has {alpha} and {beta}")
    return call(node, "hardsigmoid.default", node.x)


def _gelu(node: OnnxNode) -> list[OnnxCall]:
    approximate = node.get("approximate", "none")
    return call(node, "gelu.default", node.x, **({} if approximate == "none" else {"approximate": approximate}))


def _softmax(op: str) -> Lower:
    def lower_softmax(node: OnnxNode) -> list[OnnxCall]:
        axis = node.axis(-1 if node.opset >= 13 else 1)
        if node.opset < 13 and axis != node.rank - 1:
            raise NoOperator("unsupported: softmax over several dimensions")
        return call(node, op, node.x, axis, False)

    return lower_softmax


def _topk(node: OnnxNode) -> list[OnnxCall]:
    count = node.whole("k", 1)
    if not count:
        raise NoOperator("its input k is missing or data-dependent")
    flags = bool(node.get("largest", 1)), bool(node.get("sorted", 1))
    outputs = tuple(NOT_RECORDED if item is None else item for item in node.outputs)
    return call(node, "topk.default", node.x, count[0], node.axis(-1), *flags, outputs=outputs)


def _cumsum(node: OnnxNode) -> list[OnnxCall]:
    axis = node.whole("axis", 1)
    if not axis or node.get("exclusive", 0) or node.get("reverse", 0):
        raise NoOperator("unsupported: cumulative sum with `exclusive`, `reverse` or an axis that is not constant")
    return call(node, "cumsum.default", node.x, axis[0])


def _triangle(node: OnnxNode) -> list[OnnxCall]:
    offset = node.whole("k", 1) or [0]
    return call(node, "triu.default" if node.get("upper", 1) else "tril.default", node.x, offset[0])


def _range(node: OnnxNode) -> list[OnnxCall]:
    ends = [node.constants[index] for index in range(3)]
    # only the length of a computed list is known
    start, end, step = [item[0] for item in ends if item] if all(ends) else [0, node.out.shape[0], 1]
    return call(node, "arange.start_step", start, end, step, dtype=node.out.dtype)


def _full(node: OnnxNode) -> list[OnnxCall]:
    value = node.attributes.get("value", [0.0])
    if not isinstance(value, list) or len(value) != 1:
        raise NoOperator("its value is not a single number")
    return call(node, "full.default", list(node.out.shape), value[0], dtype=node.out.dtype)


FAR = 1 << 62  # absolute value above which the start or end of a slice means the end of the dimension


def _view(node: OnnxNode) -> list[OnnxCall]:
    if prod(node.x.shape) != prod(node.out.shape):
        raise NoOperator("its input and output have different numbers of elements")
    return call(node, "view.default", node.x, list(node.out.shape))


def _squeeze(node: OnnxNode) -> list[OnnxCall]:
    axes = node.whole("axes", 1)
    if axes is None:
        return call(node, "squeeze.default", node.x)
    return call(node, "squeeze.dims", node.x, axes)


def _unsqueeze(node: OnnxNode) -> list[OnnxCall]:
    axes = node.whole("axes", 1)
    if axes is not None and len(axes) == 1:
        return call(node, "unsqueeze.default", node.x, axes[0])
    return _view(node)


def _split(node: OnnxNode) -> list[OnnxCall]:
    axis = node.axis(0)
    pieces = [item for item in node.outputs if item is not None]
    if len(pieces) != len(node.outputs):
        raise NoOperator("unsupported: split with unused outputs, whose sizes are unknown")
    sizes = [item.shape[axis] for item in pieces]
    return call(node, "split_with_sizes.default", node.x, sizes, axis, outputs=pieces)


def _slice(node: OnnxNode) -> list[OnnxCall]:
    starts, ends = node.whole("starts", 1), node.whole("ends", 2)
    if starts is None or ends is None:
        raise NoOperator("its starts or ends are missing or data-dependent")
    axes = node.whole("axes", 3) or list(range(len(starts)))
    steps = node.whole("steps", 4) or [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or not starts:
        raise NoOperator("its starts, ends, axes and steps differ in number")
    calls: list[OnnxCall] = []
    x = node.x
    for index, (start, end, axis, step) in enumerate(zip(starts, ends, axes, steps, strict=True)):
        if step < 1 or not -node.rank <= axis < node.rank:
            raise NoOperator(f"unsupported: step {step} along dimension {axis} of {node.rank}")
        size = x.shape[axis]
        shape = list(x.shape)
        shape[axis] = len(range(*slice(start, end, step).indices(size)))
        result = node.out if index == len(starts) - 1 else node.step(tuple(shape))
        last = min(end, FAR)
        args = (x, axis, max(start, -FAR), last, *([step] if step != 1 else []))
        calls.append(OnnxCall("slice.Tensor", args, result, {}))
        x = result
    return calls


def _gather(node: OnnxNode) -> list[OnnxCall]:
    index, axis = node.input(1), node.axis(0)
    values = node.constants[1]
    if not index.shape and values is not None and len(values) == 1:
        return call(node, "select.int", node.x, axis, values[0])
    if axis == 0 and node.rank == 2 and values is None:
        return call(node, "embedding.default", node.x, index)
    if len(index.shape) == 1:
        return call(node, "index_select.default", node.x, axis, index)
    return call(node, "index.Tensor", node.x, [*[None] * axis, index])


def _scatter_elements(node: OnnxNode) -> list[OnnxCall]:
    reductions = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    reduction = node.get("reduction", "none")
    args = (node.x, node.axis(0), node.input(1), node.input(2))
    if reduction == "none":
        return call(node, "scatter.src", *args)
    if reduction not in reductions:
        raise NoOperator(f"torch does not have the reduction {reduction[:40]!r}")
    return call(node, "scatter_reduce.two", *args, reductions[reduction])


def _tile(node: OnnxNode) -> list[OnnxCall]:
    repeats = node.whole("repeats", 1)
    if repeats is None or len(repeats) != node.rank or min(repeats, default=0) < 0:
        raise NoOperator("its repeats are missing, negative, or not one per dimension")
    return call(node, "repeat.default", node.x, repeats)


def _pad(node: OnnxNode) -> list[OnnxCall]:
    pads = node.whole("pads", 1) or []
    axes = node.whole("axes", 3) if node.has(3) else None
    dims = [axis % max(node.rank, 1) for axis in axes] if axes is not None else list(range(node.rank))
    if len(pads) != 2 * len(dims):
        raise NoOperator("its pads are not two numbers for each dimension")
    amounts = {axis: (pads[item], pads[item + len(dims)]) for item, axis in enumerate(dims)}
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
        raise NoOperator(f"torch cannot pad {len(last_first)} dimensions by {flat} in the mode {mode[:40]!r}")
    return call(node, f"{names[mode]}_pad{len(last_first)}d.default", node.x, flat)


def _depth_to_space(node: OnnxNode) -> list[OnnxCall]:
    if node.get("mode", "DCR") != "CRD":
        raise NoOperator("torch's operator orders channels as in the mode CRD, but the node has the mode DCR")
    return call(node, "pixel_shuffle.default", node.x, int(node.get("blocksize", 1)))


def _non_zero(node: OnnxNode) -> list[OnnxCall]:
    columns, rows = node.out.shape
    # ONNX has one row per dimension, torch one column
    indices = replace(node.out, shape=(rows, columns), stride=(columns, 1), storage=node.between())
    return [OnnxCall("nonzero.default", (node.x,), indices, {}), OnnxCall("t.default", (indices,), node.out, {})]


def _shape(node: OnnxNode) -> list[OnnxCall]:
    start, end = node.get("start", 0), node.get("end", node.rank)
    if (start, end) == (0, node.rank):
        return call(node, "_shape_as_tensor.default", node.x)
    sizes = node.step((node.rank,), node.out.dtype)
    whole = OnnxCall("_shape_as_tensor.default", (node.x,), sizes, {})
    return [whole, OnnxCall("slice.Tensor", (sizes, 0, start, end), node.out, {})]


# functions that convert a node to calls, by ONNX operator; nodes of other operators are counted with the reason
TABLE: dict[str, Lower] = {
    **{name: _unary(op) for name, op in UNARY.items()},
    **{name: _binary(op) for name, op in BINARY.items()},
    **{name: _of_all(op) for name, op in OF_ALL.items()},
    **{name: _reduction(op, before) for name, (op, before) in REDUCTIONS.items()},
    "ArgMax": lambda node: call(node, "argmax.default", node.x, node.axis(0), node.keeps_dimensions),
    "ArgMin": lambda node: call(node, "argmin.default", node.x, node.axis(0), node.keeps_dimensions),
    "Cast": lambda node: call(node, "_to_copy.default", node.x, dtype=node.out.dtype),
    "CastLike": lambda node: call(node, "_to_copy.default", node.x, dtype=node.out.dtype),
    "Celu": _lower_with("celu.default", ("alpha", 1.0)),
    "Clip": _clip,
    "ConstantOfShape": _full,
    "CumSum": _cumsum,
    "Div": _div,
    "Dropout": _unary("alias"),
    "Einsum": lambda node: call(node, "einsum.default", node.get("equation", ""), node.all_inputs()),
    "Elu": _lower_with("elu.default", ("alpha", 1.0)),
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "LeakyRelu": _lower_with("leaky_relu.default", ("alpha", 0.01)),
    "LogSoftmax": _softmax("_log_softmax.default"),
    "Mod": lambda node: call(node, MODULO[bool(node.get("fmod", 0))], node.x, node.input(1)),
    "PRelu": _binary("_prelu_kernel.default"),
    "Pow": _pow,
    "RandomNormalLike": _unary("randn_like"),
    "RandomUniformLike": _unary("rand_like"),
    "Range": _range,
    "ReduceProd": _prod,
    "Softmax": _softmax("_softmax.default"),
    "ThresholdedRelu": lambda node: call(node, "threshold.default", node.x, node.get("alpha", 1.0), 0.0),
    "TopK": _topk,
    "Trilu": _triangle,
    "Where": lambda node: call(node, "where.self", node.x, node.input(1), node.input(2)),
    **LAYERS,
    "DepthToSpace": _depth_to_space,
    "Flatten": _view,
    "Gather": _gather,
    "NonZero": _non_zero,
    "Pad": _pad,
    "Reshape": _view,
    "ScatterElements": _scatter_elements,
    "Shape": _shape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Unsqueeze": _unsqueeze,
    "Concat": lambda node: call(node, "cat.default", node.all_inputs(), node.axis(0)),
    "Expand": lambda node: call(node, "expand.default", node.x, list(node.out.shape)),
    "GatherElements": lambda node: call(node, "gather.default", node.x, node.axis(0), node.input(1)),
    "Transpose": lambda node: call(node, "permute.default", node.x, node.get("perm", list(reversed(range(node.rank))))),
}
