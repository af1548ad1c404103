"""Operators of aten for the operators of ONNX: the table, and how arguments are said.

A node becomes one call where torch has an operator for it, and several where that takes a padding or a product apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opgrip.traces.formats.building import NOT_RECORDED
from opgrip.traces.formats.onnx_layers import LAYERS
from opgrip.traces.formats.onnx_nodes import Call, Node, NoOperator, call
from opgrip.traces.formats.onnx_shapes import SHAPES

Lower = Callable[[Node], list[Call]]

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
OF_ALL = {"Max": "maximum.default", "Min": "minimum.default", "Sum": "add.Tensor"}
"""Of as many inputs as there are, two at a time."""
REDUCTIONS = {
    "ReduceL1": ("linalg_vector_norm.default", (1,)),
    "ReduceL2": ("linalg_vector_norm.default", (2,)),
    "ReduceLogSumExp": ("logsumexp.default", ()),
    "ReduceMax": ("amax.default", ()),
    "ReduceMean": ("mean.dim", ()),
    "ReduceMin": ("amin.default", ()),
    "ReduceSum": ("sum.dim_IntList", ()),
}
REASONS = {
    "If": "which of its graphs runs is not told",
    "Loop": "how often its graph runs is not told",
    "Scan": "how often its graph runs is not told",
    "Size": "torch has sizes without an operator",
    **dict.fromkeys(("GRU", "LSTM", "RNN"), "torch's operator takes other weights"),
}
"""Why nodes have no operator, where it is known."""


def check_operator(op: str) -> None:
    """Raise `NoOperator` for an operator of ONNX that the table lacks."""
    if op not in TABLE:
        raise NoOperator(REASONS.get(op, "no aten operator for it"))


def lower(node: Node) -> list[Call]:
    """The calls of a node of an operator that the table has.

    Raises
    ------
    NoOperator : where there are none for its attributes or shapes
    """
    return TABLE[node.op](node)


def _unary(op: str) -> Lower:
    return lambda node: call(node, f"{op}.default", node.x)


def _binary(op: str) -> Lower:
    return lambda node: call(node, op, node.x, node.input(1))


def _of_all(op: str) -> Lower:
    def lower_all(node: Node) -> list[Call]:
        first, *others = [node.input(place) for place in range(len(node.inputs))]
        if not others:
            return call(node, "alias.default", first)
        calls: list[Call] = []
        for place, other in enumerate(others):
            is_last = place == len(others) - 1
            shape = tuple(torch.broadcast_shapes(first.shape, other.shape))
            result = node.out if is_last else node.step(shape)
            calls.append(Call(op, (first, other), result, {}))
            first = result
        return calls

    return lower_all


def _reduction(op: str, before: tuple[Any, ...]) -> Lower:
    def reduce(node: Node) -> list[Call]:
        axes = node.whole("axes", 1)
        if not axes and node.get("noop_with_empty_axes", 0):
            return call(node, "alias.default", node.x)
        dims = [axis % max(node.rank, 1) for axis in axes] if axes else list(range(node.rank))
        return call(node, op, node.x, *before, dims, bool(node.get("keepdims", 1)))

    return reduce


def _prod(node: Node) -> list[Call]:
    axes = node.whole("axes", 1)
    if not axes or len(axes) != 1:
        raise NoOperator("a product over several dimensions")
    return call(node, "prod.dim_int", node.x, axes[0], bool(node.get("keepdims", 1)))


def _argument(op: str) -> Lower:
    return lambda node: call(node, op, node.x, node.axis(0), bool(node.get("keepdims", 1)))


def _div(node: Node) -> list[Call]:
    if node.x.dtype.is_floating_point:
        return call(node, "div.Tensor", node.x, node.input(1))
    return call(node, "div.Tensor_mode", node.x, node.input(1), rounding_mode="trunc")


def _pow(node: Node) -> list[Call]:
    values = node.constants[1] if len(node.constants) > 1 else None
    if values is not None and len(values) == 1 and isinstance(values[0], int | float):
        return call(node, "pow.Tensor_Scalar", node.x, values[0])
    return call(node, "pow.Tensor_Tensor", node.x, node.input(1))


def _mod(node: Node) -> list[Call]:
    return call(node, "fmod.Tensor" if node.get("fmod", 0) else "remainder.Tensor", node.x, node.input(1))


def _where(node: Node) -> list[Call]:
    return call(node, "where.self", node.x, node.input(1), node.input(2))


def _prelu(node: Node) -> list[Call]:
    return call(node, "_prelu_kernel.default", node.x, node.input(1))


def _clip(node: Node) -> list[Call]:
    bounds = [node.numbers(name, place) for place, name in ((1, "min"), (2, "max"))]
    if not any(bounds):
        return call(node, "alias.default", node.x)
    return call(node, "clamp.default", node.x, *(bound[0] if bound else None for bound in bounds))


def _with(op: str, *attributes: tuple[str, float]) -> Lower:
    """An operator whose parameters are attributes, with ONNX's defaults."""
    return lambda node: call(node, op, node.x, *(node.get(name, default) for name, default in attributes))


def _elu(node: Node) -> list[Call]:
    return call(node, "elu.default", node.x, node.get("alpha", 1.0))


def _threshold(node: Node) -> list[Call]:
    return call(node, "threshold.default", node.x, node.get("alpha", 1.0), 0.0)


def _hard_sigmoid(node: Node) -> list[Call]:
    alpha, beta = node.get("alpha", 0.2), node.get("beta", 0.5)
    if abs(alpha - 1 / 6) > 1e-6 or beta != 0.5:
        raise NoOperator("torch's operator has another slope")
    return call(node, "hardsigmoid.default", node.x)


def _gelu(node: Node) -> list[Call]:
    approximate = node.get("approximate", "none")
    return call(node, "gelu.default", node.x, **({} if approximate == "none" else {"approximate": approximate}))


def _softmax(op: str) -> Lower:
    def lower_softmax(node: Node) -> list[Call]:
        axis = node.axis(-1 if node.opset >= 13 else 1)
        if node.opset < 13 and axis != node.rank - 1:
            raise NoOperator("a softmax over several dimensions")
        return call(node, op, node.x, axis, False)

    return lower_softmax


def _cast(node: Node) -> list[Call]:
    return call(node, "_to_copy.default", node.x, dtype=node.out.dtype)


def _topk(node: Node) -> list[Call]:
    count = node.whole("k", 1)
    if not count:
        raise NoOperator("it lacks its number")
    flags = bool(node.get("largest", 1)), bool(node.get("sorted", 1))
    outputs = tuple(NOT_RECORDED if item is None else item for item in node.outputs)
    return call(node, "topk.default", node.x, count[0], node.axis(-1), *flags, outputs=outputs)


def _cumsum(node: Node) -> list[Call]:
    axis = node.whole("axis", 1)
    if not axis or node.get("exclusive", 0) or node.get("reverse", 0):
        raise NoOperator("torch's operator sums forward, each element with itself")
    return call(node, "cumsum.default", node.x, axis[0])


def _einsum(node: Node) -> list[Call]:
    operands = [node.input(place) for place in range(len(node.inputs))]
    return call(node, "einsum.default", node.get("equation", ""), operands)


def _triangle(node: Node) -> list[Call]:
    offset = node.whole("k", 1) or [0]
    return call(node, "triu.default" if node.get("upper", 1) else "tril.default", node.x, offset[0])


def _range(node: Node) -> list[Call]:
    ends = [node.constants[place] for place in range(3)]
    # of a computed one the length is known
    start, end, step = [item[0] for item in ends if item] if all(ends) else [0, node.out.shape[0], 1]
    return call(node, "arange.start_step", start, end, step, dtype=node.out.dtype)


def _full(node: Node) -> list[Call]:
    value = node.attributes.get("value", [0.0])
    if not isinstance(value, list) or len(value) != 1:
        raise NoOperator("a value that cannot be read")
    return call(node, "full.default", list(node.out.shape), value[0], dtype=node.out.dtype)


def _random_like(op: str) -> Lower:
    return lambda node: call(node, op, node.x)


TABLE: dict[str, Lower] = {
    **{name: _unary(op) for name, op in UNARY.items()},
    **{name: _binary(op) for name, op in BINARY.items()},
    **{name: _of_all(op) for name, op in OF_ALL.items()},
    **{name: _reduction(op, before) for name, (op, before) in REDUCTIONS.items()},
    "ArgMax": _argument("argmax.default"),
    "ArgMin": _argument("argmin.default"),
    "Cast": _cast,
    "CastLike": _cast,
    "Celu": _with("celu.default", ("alpha", 1.0)),
    "Clip": _clip,
    "ConstantOfShape": _full,
    "CumSum": _cumsum,
    "Div": _div,
    "Dropout": _unary("alias"),
    "Einsum": _einsum,
    "Elu": _elu,
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "LeakyRelu": _with("leaky_relu.default", ("alpha", 0.01)),
    "LogSoftmax": _softmax("_log_softmax.default"),
    "Mod": _mod,
    "PRelu": _prelu,
    "Pow": _pow,
    "RandomNormalLike": _random_like("randn_like.default"),
    "RandomUniformLike": _random_like("rand_like.default"),
    "Range": _range,
    "ReduceProd": _prod,
    "Softmax": _softmax("_softmax.default"),
    "ThresholdedRelu": _threshold,
    "TopK": _topk,
    "Trilu": _triangle,
    "Where": _where,
    **LAYERS,
    **SHAPES,
}
"""What is not here is named with the reason when a model has it."""
