"""Conversion of ONNX's convolutions, products, poolings, normalizations, resizing and attention to aten operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch

from opgrip.traces.formats.building import NOT_RECORDED
from opgrip.traces.formats.onnx_nodes import NoOperator, OnnxCall, OnnxNode, call, transposed
from opgrip.traces.schema.arguments import TensorSpec

Lower = Callable[[OnnxNode], list[OnnxCall]]


def _padding(node: OnnxNode, kernel: list[int], stride: list[int], dilation: list[int]) -> tuple[list[int], list[int]]:
    """Return the padding before and after each spatial dimension of a convolution or pooling."""
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
    """Return the calls that pad the first input, the padded tensor, and the padding that the operator itself
    applies.
    """
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
        raise NoOperator("torch's operator crops both sides by the same amount")
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
    scale, bias, mean, variance = (node.input(place) for place in range(1, 5))
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
    query, key, value = (node.input(place) for place in range(3))
    is_plain = len(query.shape) == len(key.shape) == len(value.shape) == 4 and not any(map(node.has, range(4, 7)))
    if not is_plain or node.get("softcap", 0.0):
        raise NoOperator("torch's operator needs separate heads and takes no cache")
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
        raise NoOperator("torch's operator does not have this mode")
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
        raise NoOperator(f"torch has no {mode} mode of {count} dimensions"[:80])
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
