"""Conversion of each ONNX operator to the aten operators that compute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from opgrip.traces.formats.building import NOT_RECORDED
from opgrip.traces.formats.operator_schemas import NotConverted
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.tensor_specs import contiguous


@dataclass(frozen=True, slots=True)
class OnnxCall:
    op: str
    args: tuple[Any, ...]
    outputs: Any
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """A node with the shapes of its inputs and outputs, and with known constants.

    inputs : tensors, None for an omitted input
    outputs : tensors, None for an unused output
    constants : values of each input, None if unknown or too many
    between : returns a new storage number for a value that one call of this node passes to another
    """

    op: str
    inputs: tuple[TensorSpec | None, ...]
    outputs: tuple[TensorSpec | None, ...]
    constants: tuple[list[Any] | None, ...]
    attributes: dict[str, Any]
    opset: int
    between: Callable[[], int]

    @property
    def x(self) -> TensorSpec:
        return self.input(0)

    @property
    def out(self) -> TensorSpec:
        if not self.outputs or self.outputs[0] is None:
            raise NotConverted("its first output is unused, so its shape is unknown")
        return self.outputs[0]

    @property
    def rank(self) -> int:
        return len(self.x.shape)

    def input(self, index: int) -> TensorSpec:
        value = self.optional(index)
        if value is None:
            raise NotConverted(f"its input {index} is missing")
        return value

    def all_inputs(self) -> list[TensorSpec]:
        return [self.input(index) for index in range(len(self.inputs))]

    @property
    def keeps_dimensions(self) -> bool:
        return bool(self.get("keepdims", 1))

    def optional(self, index: int) -> TensorSpec | None:
        return self.inputs[index] if index < len(self.inputs) else None

    def get(self, name: str, default: Any) -> Any:
        value = self.attributes.get(name, default)
        if type(value) is not type(default) and not (value is None or default is None):
            raise NotConverted(
                f"its attribute {name} has the type {type(value).__name__}, not {type(default).__name__}"
            )
        return value

    def numbers(self, name: str, index: int) -> list[Any] | None:
        """Return the numbers in attribute `name` (older ONNX versions) or input `index` (newer ones)."""
        if name in self.attributes:
            value = self.attributes[name]
            return list(value) if isinstance(value, list) else [value]
        if self.optional(index) is None:
            return None
        values = self.constants[index]
        if values is None:
            raise NotConverted(f"its {name} are data-dependent")
        return list(values)

    def whole(self, name: str, index: int) -> list[int] | None:
        values = self.numbers(name, index)
        if values is not None and not all(type(value) is int and abs(value) <= 1 << 63 for value in values):
            raise NotConverted(f"its {name} are not integers")
        return values

    def axis(self, default: int, name: str = "axis") -> int:
        value = int(self.get(name, default))
        if not -self.rank <= value < max(self.rank, 1):
            raise NotConverted(f"its {name} is {value}, but its input has {self.rank} dimensions")
        return value % max(self.rank, 1)

    def spatial(self, name: str, default: int) -> list[int]:
        count = self.rank - 2
        if count not in (1, 2, 3):
            raise NotConverted(f"unsupported: {count} spatial dimensions")
        values: list[int] = self.get(name, [default] * count)
        if len(values) != count:
            raise NotConverted(f"its {name} have {len(values)} elements for {count} spatial dimensions")
        return values

    def step(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> TensorSpec:
        return tensor(shape, dtype or self.x.dtype, self.between())


def tensor(shape: tuple[int, ...], dtype: torch.dtype, storage: int | None) -> TensorSpec:
    return TensorSpec(shape, contiguous(shape), dtype, "cpu", storage=storage)


def transposed(spec: TensorSpec) -> TensorSpec:
    assert spec.stride is not None, "it is strided"
    if len(spec.shape) < 2:
        raise NotConverted("unsupported: transposition of a tensor with fewer than two dimensions")
    *rest, rows, columns = range(len(spec.shape))
    order = (*rest, columns, rows)
    shape, stride = (tuple(sizes[index] for index in order) for sizes in (spec.shape, spec.stride))
    return replace(spec, shape=shape, stride=stride)


def call(node: OnnxNode, op: str, *args: Any, outputs: Any = None, **kwargs: Any) -> list[OnnxCall]:
    return [OnnxCall(op, args, node.out if outputs is None else outputs, kwargs)]


Lower = Callable[[OnnxNode], list[OnnxCall]]


def _padding(node: OnnxNode, kernel: list[int], stride: list[int], dilation: list[int]) -> tuple[list[int], list[int]]:
    count = len(kernel)
    mode = node.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        pads = node.get("pads", [0] * 2 * count)
        if len(pads) != 2 * count or min(pads) < 0:
            raise NotConverted("its pads are not two non-negative numbers for each dimension")
        return pads[:count], pads[count:]
    if mode == "VALID":
        return [0] * count, [0] * count
    begins, ends = [], []
    for size, width, step, gap in zip(node.x.shape[2:], kernel, stride, dilation, strict=True):
        if step < 1:
            raise NotConverted(f"one of its strides is less than 1: {stride}")
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


def _conv(is_transposed: bool) -> Lower:
    def convolve(node: OnnxNode) -> list[OnnxCall]:
        weight = node.input(1)
        stride, dilation = node.spatial("strides", 1), node.spatial("dilations", 1)
        output = node.spatial("output_padding", 0) if is_transposed else [0] * len(stride)
        has_shape = "output_shape" in node.attributes or node.get("auto_pad", "NOTSET") not in ("NOTSET", "")
        if is_transposed and has_shape:
            raise NotConverted("torch's operator does not take an output shape")
        begins, ends = _padding(node, list(weight.shape[2:]), stride, dilation)
        if is_transposed and begins != ends:
            raise NotConverted("it crops its two sides by different amounts, which torch's operator cannot do")
        calls, x, padding = _padded(node, begins, ends, 0.0)
        groups = int(node.get("group", 1))
        args = (x, weight, node.optional(2), stride, padding, dilation, is_transposed, output, groups)
        return [*calls, OnnxCall("convolution.default", args, node.out, {})]

    return convolve


def _max_pool(node: OnnxNode) -> list[OnnxCall]:
    kernel, stride = node.spatial("kernel_shape", 1), node.spatial("strides", 1)
    dilation, ceil = node.spatial("dilations", 1), bool(node.get("ceil_mode", 0))
    calls, x, padding = _padded(node, *_padding(node, kernel, stride, dilation), float("-inf"))
    if any(2 * pad > width for pad, width in zip(padding, kernel, strict=True)):
        raise NotConverted(f"its padding {padding} is more than half of the window {kernel}")
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
        raise NotConverted("torch's operator has no dilation and pads both sides by the same amount")
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
    if node.optional(2) is not None:
        return call(node, "addmm.default", node.input(2), left, right, **scales)
    if alpha == 1.0:
        return call(node, "mm.default", left, right)
    product = node.step(node.out.shape)
    calls = [OnnxCall("mm.default", (left, right), product, {})]
    return [*calls, OnnxCall("mul.Scalar", (product, alpha), node.out, {})]


def _batch_norm(node: OnnxNode) -> list[OnnxCall]:
    if node.get("training_mode", 0):
        raise NotConverted("unsupported: training mode")
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
        raise NotConverted("torch's operator needs one scale per channel")
    args = (node.x, node.input(1), node.input(2), batch, channels, prod(node.x.shape[2:]), groups)
    outputs = (node.out, NOT_RECORDED, NOT_RECORDED)
    return call(node, "native_group_norm.default", *args, node.get("epsilon", 1e-5), outputs=outputs)


def _attention(node: OnnxNode) -> list[OnnxCall]:
    query, key, value = (node.input(index) for index in range(3))
    is_plain = len(query.shape) == len(key.shape) == len(value.shape) == 4 and not any(map(node.optional, range(4, 7)))
    if not is_plain or node.get("softcap", 0.0):
        raise NotConverted(
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
        raise NotConverted("torch's grid_sampler does not support this combination of mode, padding and dimensions")
    settings = (modes[mode], paddings[padding], bool(node.get("align_corners", 0)))
    return call(node, f"grid_sampler_{node.rank - 2}d.default", node.x, node.input(1), *settings)


def _resize(node: OnnxNode) -> list[OnnxCall]:
    mode, count = node.get("mode", "nearest"), node.rank - 2
    if count not in (1, 2, 3) or node.out.shape[:2] != node.x.shape[:2]:
        raise NotConverted("torch's operator resizes one to three dimensions after batch and channels")
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
        raise NotConverted(f"torch cannot resize {count} dimensions in the mode {mode}"[:80])
    return call(node, f"{names[mode, count]}.default", node.x, sizes, corners)


_SAME_NAME = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "IsInf"),
    *("IsNaN", "Log", "Mish", "Neg", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Sinh"),
    *("HardSwish", "Softplus", "Sqrt", "Tan", "Tanh"),
)
# reasons why nodes of some ONNX operators are not converted
REASONS = {
    "If": "unsupported: data-dependent control flow",
    "Loop": "unsupported: data-dependent number of iterations",
    "Scan": "unsupported: data-dependent number of iterations",
    "Size": "torch represents sizes without an operator",
    **dict.fromkeys(("GRU", "LSTM", "RNN"), "torch's operator takes the weights in another form"),
}


def _aten(op: str, inputs: int = 1, **defaults: Any) -> Lower:
    # the operator with the node's first inputs and the values of its attributes
    return lambda node: call(
        node,
        op,
        *(node.input(index) for index in range(inputs)),
        *(node.get(name, default) for name, default in defaults.items()),
    )


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


def _reduction(op: str, *before: Any) -> Lower:
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
        raise NotConverted("unsupported: product over several dimensions")
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


def _hard_sigmoid(node: OnnxNode) -> list[OnnxCall]:
    alpha, beta = node.get("alpha", 0.2), node.get("beta", 0.5)
    if abs(alpha - 1 / 6) > 1e-6 or beta != 0.5:
        raise NotConverted(f"torch's operator has alpha=1/6 and beta=0.5, the node has {alpha} and {beta}")
    return call(node, "hardsigmoid.default", node.x)


def _gelu(node: OnnxNode) -> list[OnnxCall]:
    approximate = node.get("approximate", "none")
    return call(node, "gelu.default", node.x, **({} if approximate == "none" else {"approximate": approximate}))


def _softmax(op: str) -> Lower:
    def lower_softmax(node: OnnxNode) -> list[OnnxCall]:
        axis = node.axis(-1 if node.opset >= 13 else 1)
        if node.opset < 13 and axis != node.rank - 1:
            raise NotConverted("unsupported: softmax over several dimensions")
        return call(node, op, node.x, axis, False)

    return lower_softmax


def _topk(node: OnnxNode) -> list[OnnxCall]:
    count = node.whole("k", 1)
    if not count:
        raise NotConverted("its input k is missing or data-dependent")
    flags = bool(node.get("largest", 1)), bool(node.get("sorted", 1))
    outputs = tuple(NOT_RECORDED if item is None else item for item in node.outputs)
    return call(node, "topk.default", node.x, count[0], node.axis(-1), *flags, outputs=outputs)


def _cumsum(node: OnnxNode) -> list[OnnxCall]:
    axis = node.whole("axis", 1)
    if not axis or node.get("exclusive", 0) or node.get("reverse", 0):
        raise NotConverted("unsupported: cumulative sum with `exclusive`, `reverse` or an axis that is not constant")
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
        raise NotConverted("its value is not a single number")
    return call(node, "full.default", list(node.out.shape), value[0], dtype=node.out.dtype)


FAR = 1 << 62  # absolute value above which the start or end of a slice means the end of the dimension


def _view(node: OnnxNode) -> list[OnnxCall]:
    if prod(node.x.shape) != prod(node.out.shape):
        raise NotConverted("its input and output have different numbers of elements")
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
        raise NotConverted("unsupported: split with unused outputs, whose sizes are unknown")
    sizes = [item.shape[axis] for item in pieces]
    return call(node, "split_with_sizes.default", node.x, sizes, axis, outputs=pieces)


def _slice(node: OnnxNode) -> list[OnnxCall]:
    starts, ends = node.whole("starts", 1), node.whole("ends", 2)
    if starts is None or ends is None:
        raise NotConverted("its starts or ends are missing or data-dependent")
    axes = node.whole("axes", 3) or list(range(len(starts)))
    steps = node.whole("steps", 4) or [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or not starts:
        raise NotConverted("its starts, ends, axes and steps differ in number")
    calls: list[OnnxCall] = []
    x = node.x
    for index, (start, end, axis, step) in enumerate(zip(starts, ends, axes, steps, strict=True)):
        if step < 1 or not -node.rank <= axis < node.rank:
            raise NotConverted(f"unsupported: step {step} along dimension {axis} of {node.rank}")
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
        raise NotConverted(f"torch does not have the reduction {reduction[:40]!r}")
    return call(node, "scatter_reduce.two", *args, reductions[reduction])


def _tile(node: OnnxNode) -> list[OnnxCall]:
    repeats = node.whole("repeats", 1)
    if repeats is None or len(repeats) != node.rank or min(repeats, default=0) < 0:
        raise NotConverted("its repeats are missing, negative, or not one per dimension")
    return call(node, "repeat.default", node.x, repeats)


def _pad(node: OnnxNode) -> list[OnnxCall]:
    pads = node.whole("pads", 1) or []
    axes = node.whole("axes", 3) if node.optional(3) is not None else None
    dims = [axis % max(node.rank, 1) for axis in axes] if axes is not None else list(range(node.rank))
    if len(pads) != 2 * len(dims):
        raise NotConverted("its pads are not two numbers for each dimension")
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
        raise NotConverted(f"torch cannot pad {len(last_first)} dimensions by {flat} in the mode {mode[:40]!r}")
    return call(node, f"{names[mode]}_pad{len(last_first)}d.default", node.x, flat)


def _depth_to_space(node: OnnxNode) -> list[OnnxCall]:
    if node.get("mode", "DCR") != "CRD":
        raise NotConverted("torch's operator orders channels as in the mode CRD, but the node has the mode DCR")
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
    **{name: _aten(f"{name.lower()}.default") for name in _SAME_NAME},
    "Add": _aten("add.Tensor", 2),
    "And": _aten("logical_and.default", 2),
    "ArgMax": lambda node: call(node, "argmax.default", node.x, node.axis(0), node.keeps_dimensions),
    "ArgMin": lambda node: call(node, "argmin.default", node.x, node.axis(0), node.keeps_dimensions),
    "Attention": _attention,
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "BitwiseAnd": _aten("bitwise_and.Tensor", 2),
    "BitwiseNot": _aten("bitwise_not.default"),
    "BitwiseOr": _aten("bitwise_or.Tensor", 2),
    "BitwiseXor": _aten("bitwise_xor.Tensor", 2),
    "Cast": lambda node: call(node, "_to_copy.default", node.x, dtype=node.out.dtype),
    "CastLike": lambda node: call(node, "_to_copy.default", node.x, dtype=node.out.dtype),
    "Celu": _aten("celu.default", alpha=1.0),
    "Clip": _clip,
    "Concat": lambda node: call(node, "cat.default", node.all_inputs(), node.axis(0)),
    "ConstantOfShape": _full,
    "Conv": _conv(False),
    "ConvTranspose": _conv(True),
    "CumSum": _cumsum,
    "DepthToSpace": _depth_to_space,
    "Div": _div,
    "Dropout": _aten("alias.default"),
    "Einsum": lambda node: call(node, "einsum.default", node.get("equation", ""), node.all_inputs()),
    "Elu": _aten("elu.default", alpha=1.0),
    "Equal": _aten("eq.Tensor", 2),
    "Expand": lambda node: call(node, "expand.default", node.x, list(node.out.shape)),
    "Flatten": _view,
    "Gather": _gather,
    "GatherElements": lambda node: call(node, "gather.default", node.x, node.axis(0), node.input(1)),
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": _global("mean.dim"),
    "GlobalMaxPool": _global("amax.default"),
    "Greater": _aten("gt.Tensor", 2),
    "GreaterOrEqual": _aten("ge.Tensor", 2),
    "GridSample": _grid_sample,
    "GroupNormalization": _group_norm,
    "HardSigmoid": _hard_sigmoid,
    "Identity": _aten("alias.default"),
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "LeakyRelu": _aten("leaky_relu.default", alpha=0.01),
    "Less": _aten("lt.Tensor", 2),
    "LessOrEqual": _aten("le.Tensor", 2),
    "LogSoftmax": _softmax("_log_softmax.default"),
    "MatMul": _matmul,
    "Max": _of_all("maximum.default"),
    "MaxPool": _max_pool,
    "Min": _of_all("minimum.default"),
    "Mod": lambda node: call(node, "fmod.Tensor" if node.get("fmod", 0) else "remainder.Tensor", node.x, node.input(1)),
    "Mul": _aten("mul.Tensor", 2),
    "NonZero": _non_zero,
    "Not": _aten("logical_not.default"),
    "Or": _aten("logical_or.default", 2),
    "PRelu": _aten("_prelu_kernel.default", 2),
    "Pad": _pad,
    "Pow": _pow,
    "RMSNormalization": _rms_norm,
    "RandomNormalLike": _aten("randn_like.default"),
    "RandomUniformLike": _aten("rand_like.default"),
    "Range": _range,
    "ReduceL1": _reduction("linalg_vector_norm.default", 1),
    "ReduceL2": _reduction("linalg_vector_norm.default", 2),
    "ReduceLogSumExp": _reduction("logsumexp.default"),
    "ReduceMax": _reduction("amax.default"),
    "ReduceMean": _reduction("mean.dim"),
    "ReduceMin": _reduction("amin.default"),
    "ReduceProd": _prod,
    "ReduceSum": _reduction("sum.dim_IntList"),
    "Reshape": _view,
    "Resize": _resize,
    "ScatterElements": _scatter_elements,
    "Shape": _shape,
    "Slice": _slice,
    "Softmax": _softmax("_softmax.default"),
    "Split": _split,
    "Squeeze": _squeeze,
    "Sub": _aten("sub.Tensor", 2),
    "Sum": _of_all("add.Tensor"),
    "Swish": _aten("silu.default"),
    "ThresholdedRelu": lambda node: call(node, "threshold.default", node.x, node.get("alpha", 1.0), 0.0),
    "Tile": _tile,
    "TopK": _topk,
    "Transpose": lambda node: call(node, "permute.default", node.x, node.get("perm", list(reversed(range(node.rank))))),
    "Trilu": _triangle,
    "Unsqueeze": _unsqueeze,
    "Upsample": _resize,
    "Where": _aten("where.self", 3),
    "Xor": _aten("logical_xor.default", 2),
}
