"""Inputs and attributes of a node for each ONNX operator that has an aten operator."""

from typing import Any

import numpy as np
from onnx import TensorProto, helper


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def positive(*shape: int) -> np.ndarray[Any, Any]:
    return np.abs(normal(*shape)) + np.float32(0.1)


def whole(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


IMAGE, SQUARE = normal(2, 4, 6, 6), normal(3, 4)
TRUE_FALSE = SQUARE > 0
# Inputs and attributes of nodes. A tuple holds a constant of the model; an empty tuple is an omitted input.
NODES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    **dict.fromkeys(("Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "Identity", "Neg", "Relu", "Round"), ([SQUARE], {})),
    **dict.fromkeys(
        ("Asinh", "Atan", "Cosh", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Tan", "Tanh"), ([SQUARE], {})
    ),
    **dict.fromkeys(("HardSwish", "IsInf", "IsNaN", "Selu", "Mish", "Celu", "LeakyRelu"), ([SQUARE], {})),
    **dict.fromkeys(("Log", "Reciprocal", "Sqrt"), ([positive(3, 4)], {})),
    **dict.fromkeys(("Acos", "Asin", "Atanh"), ([np.tanh(SQUARE)], {})),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum"), ([SQUARE, normal(4)], {})),
    **dict.fromkeys(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"), ([SQUARE, normal(3, 1)], {})),
    **dict.fromkeys(("And", "Or", "Xor"), ([TRUE_FALSE, TRUE_FALSE[:1]], {})),
    **dict.fromkeys(("BitwiseAnd", "BitwiseOr", "BitwiseXor"), ([whole(5, 6), whole(3, 9)], {})),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"), ([IMAGE, (whole(1, 3),)], {"keepdims": 0})),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceLogSumExp"), ([IMAGE, (whole(-1),)], {})),
    **dict.fromkeys(("ArgMax", "ArgMin"), ([SQUARE], {"axis": 1, "keepdims": 0})),
    **dict.fromkeys(("Softmax", "LogSoftmax"), ([SQUARE], {"axis": 0})),
    "Acosh": ([positive(3, 4) + 1], {}),
    "AveragePool": ([IMAGE], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}),
    "BatchNormalization": ([IMAGE, normal(4), normal(4), normal(4), positive(4)], {"epsilon": 0.01}),
    "BitwiseNot": ([whole(5, -6)], {}),
    "Cast": ([SQUARE], {"to": TensorProto.INT32}),
    "CastLike": ([SQUARE, whole(1)], {}),
    "Clip": ([SQUARE, (np.float32(-0.5),), (np.float32(0.5),)], {}),
    "Concat": ([SQUARE, normal(2, 4)], {"axis": 0}),
    "ConstantOfShape": ([(whole(2, 3),)], {"value": helper.make_tensor("v", TensorProto.FLOAT, [1], [2.5])}),
    "Conv": ([IMAGE, normal(6, 2, 3, 3), normal(6)], {"group": 2, "pads": [0, 1, 1, 2], "strides": [2, 1]}),
    "ConvTranspose": ([IMAGE, normal(4, 3, 3, 3)], {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
    "CumSum": ([SQUARE, (np.int64(1),)], {}),
    "DepthToSpace": ([IMAGE], {"blocksize": 2, "mode": "CRD"}),
    "Dropout": ([SQUARE], {}),
    "Einsum": ([SQUARE, normal(4, 5)], {"equation": "ij,jk->ki"}),
    "Elu": ([SQUARE], {"alpha": 0.5}),
    "Expand": ([normal(3, 1), (whole(2, 1, 4),)], {}),
    "Flatten": ([IMAGE], {"axis": 2}),
    "Gather": ([IMAGE, whole(3, 1, -1, 0).reshape(2, 2) % 4], {"axis": 1}),
    "GatherElements": ([SQUARE, whole(1, 0, 2, 1).reshape(1, 4)], {}),
    "Gemm": ([normal(4, 3), normal(5, 4), normal(5)], {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}),
    "GlobalAveragePool": ([IMAGE], {}),
    "GlobalMaxPool": ([IMAGE], {}),
    "GridSample": ([IMAGE, np.tanh(normal(2, 5, 5, 2))], {"mode": "nearest"}),
    "HardSigmoid": ([SQUARE], {"alpha": 1 / 6}),
    "InstanceNormalization": ([IMAGE, normal(4), normal(4)], {}),
    "LayerNormalization": ([IMAGE, normal(6, 6), normal(6, 6)], {"axis": 2}),
    "MatMul": ([normal(2, 3, 4), normal(4, 5)], {}),
    "MaxPool": ([IMAGE], {"kernel_shape": [3, 3], "pads": [0, 0, 1, 1], "strides": [2, 2]}),
    "Mod": ([whole(7, -7), whole(3, 3)], {}),
    "Not": ([TRUE_FALSE], {}),
    "PRelu": ([SQUARE, positive(4)], {}),
    "Pad": ([SQUARE, (whole(1, 0, 2, 3),)], {"mode": "constant"}),
    "Pow": ([positive(3, 4), (np.float32(1.5),)], {}),
    "Range": ([(np.int64(2),), (np.int64(11),), (np.int64(3),)], {}),
    "ReduceProd": ([SQUARE, (whole(1),)], {}),
    "Reshape": ([IMAGE, (whole(2, -1, 9),)], {}),
    "Resize": ([IMAGE, (), (), (whole(2, 4, 12, 12),)], {"mode": "linear"}),
    "ScatterElements": ([SQUARE, whole(1, 0, 2, 1).reshape(1, 4), normal(1, 4)], {"axis": 0}),
    "Shape": ([IMAGE], {"start": 1, "end": 3}),
    "Slice": ([IMAGE, (whole(1, -5),), (whole(4, 1 << 62),), (whole(2, 3),), (whole(1, 2),)], {}),
    "Split": ([SQUARE, (whole(1, 3),)], {"axis": 1}),
    "Squeeze": ([normal(1, 3, 1, 2), (whole(0, 2),)], {}),
    "ThresholdedRelu": ([SQUARE], {"alpha": 0.3}),
    "Tile": ([SQUARE, (whole(2, 3),)], {}),
    "TopK": ([SQUARE, (whole(2),)], {"axis": 1}),
    "Transpose": ([IMAGE], {"perm": [0, 2, 3, 1]}),
    "Trilu": ([normal(4, 4), (np.int64(1),)], {"upper": 0}),
    "Unsqueeze": ([SQUARE, (whole(0, 2),)], {}),
    "Where": ([TRUE_FALSE, SQUARE, normal(4)], {}),
}
UNTRIED = {
    "Attention": "of opset 23, whose reference is not in every onnx",
    "RMSNormalization": "of opset 23",
    "Swish": "of opset 24",
    "Gelu": "of opset 20",
    "GroupNormalization": "scales of opset 18 are by group, which torch has not",
    "NonZero": "onnx infers no shape of it",
    "RandomNormalLike": "it draws",
    "RandomUniformLike": "it draws",
    "Upsample": "deprecated",
}
