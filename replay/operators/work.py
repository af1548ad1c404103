"""The work of a call: floating-point operations, bytes to read and write, and number of operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import ceil, log2, prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from opgrip.traces.schema.arguments import leaves
from opgrip.traces.schema.tensor_specs import plain_name


@dataclass(frozen=True, slots=True)
class Work:
    """The least work that a call requires.

    flops : number of floating-point operations; None if no formula covers the call
    operators : number of operators that the dispatcher runs
    """

    flops: int | None
    bytes: int | None
    dtype: str | None
    operators: int


def work_of(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Work:
    call = call_of(function, name, args, kwargs, result)
    return Work(flops_of(call), bytes_moved(call), _dtype(call), 1)


def counted(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = True) -> Work:
    """Run a function once and return the work of all operators that it calls.

    whole : True to count only the bytes of the function's arguments and results; False to count those of each operator
    """
    tally = _Tally()
    with tally:
        result = function(*args, **kwargs)
    size = bytes_moved(call_of(function, "", args, kwargs, result)) if whole else tally.bytes
    dtype = max(tally.by_dtype, key=lambda name: tally.by_dtype[name], default=None)
    return Work(tally.flops if tally.has_flops else None, size, dtype, tally.operators)


class _Tally(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = self.operators = 0
        self.has_flops = False
        self.by_dtype: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        work = work_of(function, str(function), tuple(args), kwargs or {}, result)
        self.operators += 1
        self.has_flops |= work.flops is not None
        self.flops += work.flops or 0
        self.bytes += work.bytes or 0
        if work.dtype is not None:
            self.by_dtype[work.dtype] += work.flops or 0
        return result


def _dtype(call: OperatorCall) -> str | None:
    if call.name in NARROW_PRODUCTS:
        return plain_name(call.values["self"].dtype)
    tensors: list[torch.Tensor] = sorted(
        (*call.ins, *call.outs), key=lambda tensor: (tensor.is_floating_point() or tensor.is_complex(), tensor.numel())
    )
    return plain_name(tensors[-1].dtype) if tensors else None


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    name: str
    defaults: dict[str, Any]
    positional: int
    written: frozenset[str]
    outs: frozenset[str]
    tags: frozenset[str]


@cache
def schema_of(function: torch._ops.OpOverload) -> OperatorFacts:
    arguments, mutable = function._schema.arguments, function._schema.is_mutable
    packet = str(function._overloadpacket)
    return OperatorFacts(
        # names such as __and__ end in underscores and write nothing
        packet.removesuffix("_") if mutable and not packet.endswith("__") else packet,
        {item.name: item.default_value for item in arguments},
        sum(not item.kwarg_only for item in arguments),
        frozenset(item.name for item in arguments if item.alias_info is not None and item.alias_info.is_write),
        frozenset(item.name for item in arguments if item.is_out),
        frozenset(tag.name for tag in function.tags),
    )


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """The arguments and results of one operator call.

    name : operator name without overload and in-place underscore, such as `aten.add` or `mmcv._ext:nms`
    function : the overload; None for a function that is not an operator of torch
    """

    name: str
    function: torch._ops.OpOverload | None
    values: dict[str, Any]
    ins: tuple[torch.Tensor, ...]
    outs: tuple[torch.Tensor, ...]

    @property
    def elements(self) -> int:
        if self.name.startswith("aten._foreach_"):
            return sum(tensor.numel() for tensor in self.outs or tensors_among(self.values.get("self")))
        return max((tensor.numel() for tensor in self.outs), default=0)

    @property
    def argument_elements(self) -> int:
        return max((tensor.numel() for tensor in self.ins), default=0)

    @property
    def schema(self) -> OperatorFacts | None:
        return None if self.function is None else schema_of(self.function)


def call_of(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> OperatorCall:
    ins, outs = tensors_among([args, kwargs]), tensors_among(result)
    if not isinstance(function, torch._ops.OpOverload):
        return OperatorCall(
            name, None, {**{str(place): value for place, value in enumerate(args)}, **kwargs}, ins, outs
        )
    schema = schema_of(function)
    values = {**schema.defaults, **dict(zip(schema.defaults, args, strict=False)), **kwargs}
    return OperatorCall(schema.name, function, values, ins, outs)


def tensors_among(tree: Any) -> tuple[torch.Tensor, ...]:
    return tuple(leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def operators(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


Formula = Callable[[OperatorCall], float]

# operators without arithmetic
MOVES = operators(
    "clone _to_copy copy fill zero zeros ones full zeros_like ones_like full_like empty empty_like empty_strided "
    "scalar_tensor new_empty new_empty_strided new_zeros new_ones new_full cat stack index _unsafe_index "
    "index_select gather take scatter index_copy index_fill masked_select masked_fill masked_scatter where "
    "embedding repeat repeat_interleave constant_pad_nd reflection_pad1d reflection_pad2d replication_pad2d roll "
    "flip tril triu slice_backward select_backward upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "_local_scalar_dense split_with_sizes_copy unfold_copy im2col pixel_shuffle channel_shuffle view_copy "
    "_foreach_copy _foreach_zero"
)

# operations per element, for operators with more than one, and for operators that torch does not tag as pointwise
ELEMENTWISE: dict[str, int] = {
    **dict.fromkeys(("sigmoid", "sigmoid_backward", "tanh_backward", "lerp", "softplus", "mish"), 3),
    **dict.fromkeys(("addcmul", "addcdiv", "hardtanh", "clamp", "arange", "elu"), 2),
    **dict.fromkeys(("silu", "hardsigmoid", "gelu"), 4),
    **dict.fromkeys(("hardswish", "native_dropout", "binary_cross_entropy"), 5),
    **dict.fromkeys(("silu_backward", "gelu_backward"), 8),
    **dict.fromkeys(("clamp_min", "clamp_max", "linspace"), 1),
    **dict.fromkeys(("mse_loss", "l1_loss"), 3),
    **dict.fromkeys(("smooth_l1_loss", "huber_loss", "mse_loss_backward", "smooth_l1_loss_backward"), 5),
}

# operations per element of the largest argument, for reductions
REDUCTIONS: dict[str, int] = {
    **dict.fromkeys(("sum", "nansum", "mean", "max", "min", "prod", "all", "any", "argmax", "argmin"), 1),
    **dict.fromkeys(("cumsum", "cumprod", "nonzero"), 1),
    **dict.fromkeys(("linalg_vector_norm", "norm", "aminmax"), 2),
    # the sums of the elements and of their squares
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), 3),
    # maximum, difference, exponential, sum
    "logsumexp": 4,
    # maximum, difference, exponential, sum, quotient or difference
    **dict.fromkeys(("_softmax", "_log_softmax"), 5),
    # y * (g - sum(g * y)), and g - exp(y) * sum(g)
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), 4),
    **dict.fromkeys(("adaptive_avg_pool2d", "_adaptive_avg_pool2d", "embedding_dense_backward"), 1),
    **dict.fromkeys(("index_add", "scatter_add", "scatter_reduce", "max_pool2d_with_indices_backward"), 1),
    "upsample_bilinear2d_backward": 8,
}

NORMALIZATION = 2  # operations per element of a normalization: a difference and a product
MOMENTS = 3  # operations per element for mean and variance: two additions and a product
# operations per element of a normalization's backward, g*r*(dy - mean(dy) - z*mean(dy*z)) with z = (x-m)*r: 2 for z, 3
# for the sums, 4 for the rest (Ioffe, Szegedy 2015)
BACK_NORMALIZED = 9
# operations for the intersection over union of two boxes: 4 comparisons for its corners, 2 differences, 2 clamps, an
# area, a sum and a difference for the union, a quotient, and a comparison with the threshold
IOU = 13
# operations per element of an interpolation: one product per neighbour, and the additions
INTERPOLATION = {"linear1d": 3, "bilinear2d": 7, "trilinear3d": 15, "bicubic2d": 31}


def flops_of(call: OperatorCall) -> int | None:
    if call.function is not None:
        formula = flop_registry.get(call.function._overloadpacket)
        if formula is not None:
            return _by_torch(formula, call)
    if call.name in MOVES or (call.outs and _only_views(call)):
        return 0
    try:
        operations = _by_ours(call)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        # the formula does not cover these arguments
        return None
    return None if operations is None else int(operations)


def _by_torch(formula: Callable[..., Any], call: OperatorCall) -> int | None:
    assert call.schema is not None
    names = list(call.schema.defaults)
    args = [call.values[name] for name in names[: call.schema.positional]]
    kwargs = {name: call.values[name] for name in names[call.schema.positional :]}
    out_value = call.outs[0] if len(call.outs) == 1 else call.outs
    try:
        return int(formula(*args, **kwargs, out_val=out_value))
    except Exception:
        # torch's formulas may raise any error on arguments that they do not cover
        return None


def _by_ours(call: OperatorCall) -> float | None:
    tags = frozenset() if call.schema is None else call.schema.tags
    if call.name in FORMULAS:
        return FORMULAS[call.name](call)
    name = call.name.removeprefix("aten.").removeprefix("_foreach_")
    if name in REDUCTIONS:
        return REDUCTIONS[name] * call.argument_elements
    if name in ELEMENTWISE:
        return ELEMENTWISE[name] * max(call.elements, call.argument_elements if name.endswith("_loss") else 0)
    if name in ("add", "sub", "rsub"):
        return (1 if call.values.get("alpha", 1) == 1 else 2) * call.elements
    if call.name.startswith("aten._foreach_") or "pointwise" in tags:
        return call.elements
    if "reduction" in tags:
        return call.argument_elements
    return None


def _only_views(call: OperatorCall) -> bool:
    mutable = call.schema is None or bool(call.schema.written)
    own = {tensor.untyped_storage()._cdata for tensor in call.ins if tensor.layout is torch.strided}
    return not mutable and all(
        tensor.layout is torch.strided and tensor.untyped_storage()._cdata in own for tensor in call.outs
    )


def _normalized(call: OperatorCall, training: bool, scaled: bool) -> float:
    # without training, scale and mean of a batch norm fold into one factor and one offset
    return call.argument_elements * (NORMALIZATION + (MOMENTS if training else 0) + (2 if scaled and training else 0))


def _scaled(call: OperatorCall) -> bool:
    return call.values.get("weight") is not None


def _pooled(call: OperatorCall) -> float:
    kernel = call.values["kernel_size"]
    size = prod(kernel) if len(kernel) > 1 else kernel[0] ** (2 if "2d" in call.name else 3)
    return float(call.elements * (size - 1 if "max" in call.name else size))


def _interpolated(call: OperatorCall) -> float:
    kind = call.name.rpartition("upsample_")[2].removesuffix("_aa")
    return INTERPOLATION[kind] * call.elements


def _grid_sampled(call: OperatorCall) -> float:
    linear = INTERPOLATION["trilinear3d" if "3d" in call.name else "bilinear2d"]
    return call.elements * (linear, 0, INTERPOLATION["bicubic2d"])[int(call.values["interpolation_mode"])]


def _row_length(call: OperatorCall) -> tuple[int, int]:
    tensor = call.values["self"]
    return tensor.numel(), tensor.shape[call.values["dim"]] if tensor.dim() else 1


def _sorted(call: OperatorCall) -> float:
    elements, row = _row_length(call)
    return elements * ceil(log2(max(row, 1)))


def _topk(call: OperatorCall) -> float:
    elements, row = _row_length(call)
    result_elements = call.outs[0].numel()
    return elements + (result_elements * ceil(log2(max(int(call.values["k"]), 1))) if row else 0)


def _dot(call: OperatorCall) -> float:
    return 2 * call.argument_elements


def _attention(backward: bool) -> Formula:
    def formula(call: OperatorCall) -> float:
        query, key, value = (tuple(call.values[name].shape) for name in ("query", "key", "value"))
        if backward:
            return float(sdpa_backward_flop_count(call.values["grad_out"].shape, query, key, value))
        return float(sdpa_flop_count(query, key, value))

    return formula


def _per_parameter(operations: int) -> Formula:
    return lambda call: operations * sum(tensor.numel() for tensor in call.values["self"])


def _nms(call: OperatorCall) -> float:
    boxes, result_boxes = call.ins[0].shape[0], call.outs[0].numel()
    return IOU * (result_boxes * (result_boxes - 1) / 2 + boxes - result_boxes) + boxes * ceil(log2(max(boxes, 1)))


def _roi_align(call: OperatorCall) -> float:
    ratio = max(int(call.values.get("sampling_ratio", 0)), 1)
    return call.ins[2].numel() * ratio**2 * (INTERPOLATION["bilinear2d"] + 1)


# formulas for operators that the tables of operations per element do not contain
FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(
        (
            "aten.native_batch_norm",
            "aten._native_batch_norm_legit",
            "aten._native_batch_norm_legit_no_training",
            "aten._batch_norm_with_update",
            "aten.cudnn_batch_norm",
        ),
        lambda call: _normalized(
            call, bool(call.values.get("training", "no_training" not in call.name)), _scaled(call)
        ),
    ),
    # scale and offset differ along the normalized dimensions
    "aten.native_layer_norm": lambda call: _normalized(call, True, _scaled(call)),
    "aten.native_group_norm": lambda call: _normalized(call, True, _scaled(call)),
    # sum of squares, product with the root, scale
    "aten._fused_rms_norm": lambda call: 4 * call.argument_elements,
    "aten.native_batch_norm_backward": lambda call: BACK_NORMALIZED * call.argument_elements,
    "aten.native_group_norm_backward": lambda call: (BACK_NORMALIZED + 1) * call.argument_elements,
    # the gradient times the scale, and sums over the rows for the gradients of scale and offset
    "aten.native_layer_norm_backward": lambda call: (BACK_NORMALIZED + 4) * call.argument_elements,
    **dict.fromkeys(
        (f"aten.{kind}" for kind in ("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d")),
        _pooled,
    ),
    **{f"aten.{under}upsample_{kind}": _interpolated for kind in INTERPOLATION for under in ("", "_")},
    "aten._upsample_bilinear2d_aa": _interpolated,
    "aten._upsample_bicubic2d_aa": _interpolated,
    "aten.grid_sampler_2d": _grid_sampled,
    "aten.grid_sampler_3d": _grid_sampled,
    "aten.sort": _sorted,
    "aten.argsort": _sorted,
    "aten.topk": _topk,
    "aten.mv": _dot,
    "aten.addmv": _dot,
    "aten.dot": _dot,
    "aten.vdot": _dot,
    "aten.addr": lambda call: 2 * call.elements,
    "aten.linear": lambda call: call.elements * 2 * call.values["input"].shape[-1],
    "aten._int_mm": lambda call: 2 * call.elements * call.values["self"].shape[-1],
    "aten._cdist_forward": lambda call: 3 * call.outs[0].numel() * call.values["x1"].shape[-1],
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention(backward=False),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention(backward=True),
    "aten.nll_loss_forward": lambda call: 2 * call.values["target"].numel(),
    "aten.nll_loss2d_forward": lambda call: 2 * call.values["target"].numel(),
    "aten.index_put": lambda call: call.values["values"].numel() if call.values["accumulate"] else 0,
    "aten.dist": lambda call: 3 * call.argument_elements,
    # Kingma and Ba 2015, algorithm 1: 3 and 4 for the moments, 3 for the root, 3 for the step
    "aten._fused_adam": _per_parameter(13),
    "aten._fused_adamw": _per_parameter(15),
    "aten._fused_sgd": _per_parameter(4),
    "mmcv._ext:nms": _nms,
    "mmcv._ext:roi_align_forward": _roi_align,
}


# operators that overwrite their first argument completely without reading it
OVERWRITES = operators("copy fill zero normal uniform bernoulli exponential random log_normal cauchy geometric")
# for operators that gather elements, the argument of which they read no more elements than they return
GATHERS = {
    **dict.fromkeys(("aten.index", "aten._unsafe_index", "aten.index_select", "aten.gather", "aten.take"), "self"),
    **dict.fromkeys(("aten.masked_select", "aten.upsample_nearest1d", "aten.upsample_nearest2d"), "self"),
    **dict.fromkeys(("aten.embedding", "aten.quantized_embedding"), "weight"),
    "mmcv._ext:roi_align_forward": "0",
}
# for operators that scatter elements, the argument whose number of elements limits the number of elements that they
# write
SCATTERS = {
    **dict.fromkeys(("aten.index_put", "aten._index_put_impl", "aten._unsafe_index_put"), "values"),
    **dict.fromkeys(("aten.scatter", "aten.scatter_add", "aten.scatter_reduce"), "index"),
    **dict.fromkeys(("aten.index_add", "aten.index_copy"), "source"),
}
# operators in `SCATTERS` that also read the elements that they write
ADDS = frozenset({"aten.scatter_add", "aten.scatter_reduce", "aten.index_add"})
UNWRITTEN = operators("empty empty_like empty_strided new_empty new_empty_strided")


def bytes_moved(call: OperatorCall) -> int | None:
    if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in (*call.ins, *call.outs)):
        return None
    own = {_memory(tensor) for tensor in call.ins}
    fresh = [tensor for tensor in call.outs if _memory(tensor) not in own]
    written = frozenset() if call.schema is None else call.schema.written
    if call.outs and not fresh and not written:
        return 0
    fresh_bytes = 0 if call.name in UNWRITTEN else sum(map(distinct_bytes, fresh))
    return fresh_bytes + sum(_moved_of(call, name, tensor, name in written) for name, tensor in _arguments(call))


def distinct_bytes(tensor: torch.Tensor) -> int:
    pairs = [(size, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step or not size]
    elements = prod(size for size, _ in pairs)
    extent = 1 + sum((size - 1) * step for size, step in pairs) if elements else 0
    # overlapping windows have more elements than their memory
    return min(elements, extent) * tensor.element_size()


def _arguments(call: OperatorCall) -> list[tuple[str, torch.Tensor]]:
    keys: set[tuple[object, ...]] = set()
    arguments = []
    for name, value in call.values.items():
        for tensor in tensors_among(value):
            key = (_memory(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
            if key not in keys:
                keys.add(key)
                arguments.append((name, tensor))
    return arguments


def _moved_of(call: OperatorCall, name: str, tensor: torch.Tensor, written: bool) -> int:
    whole = distinct_bytes(tensor)
    if written:
        if call.name in OVERWRITES or (call.schema is not None and name in call.schema.outs):
            return whole
        if call.name in SCATTERS:
            values = tensors_among(call.values.get(SCATTERS[call.name]))
            touched = min(whole, max((value.numel() for value in values), default=0) * tensor.element_size())
            return touched * (2 if call.name in ADDS or call.values.get("accumulate") else 1)
        return 2 * whole
    if GATHERS.get(call.name) == name:
        others = [other.numel() for argument, other in _arguments(call) if argument != name]
        result_elements = sum(out.numel() for out in call.outs) or max(others, default=0)
        return min(whole, result_elements * tensor.element_size())
    operator = call.name.removeprefix("aten.")
    reads_nothing = name == "self" and (operator.endswith("_like") or operator.startswith("new_"))
    return 0 if reads_nothing else whole


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


NARROW_PRODUCTS = ("aten._scaled_mm", "aten._int_mm")  # 8-bit products with wider results
