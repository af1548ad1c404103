"""Conversion of kernels of FlashInfer-Bench and SOL-ExecBench to operators of torch.

The operators follow from the type of the kernel, or from its reference implementation, which is a single operator call
or a function that is interpreted on meta tensors. The reference is parsed and never run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from opgrip.traces.formats.configurations.modules import MetaRecording, Recorded
from opgrip.traces.formats.operator_inputs import literal
from opgrip.traces.formats.operator_schemas import NoOverload
from opgrip.traces.formats.tensor_programs import TensorProgram, Unconverted
from opgrip.traces.schema.arguments import TensorSpec

MOST_TEXT = 1 << 16  # maximum number of characters of a reference
EPSILON = re.compile(r"\b(?:EPS|eps|epsilon)\s*=\s*([0-9.]+(?:[eE]-?[0-9]+)?)\b")

Arguments = Mapping[str, Any]
Call = tuple[str, list[Any], dict[str, Any]]


def calls_of_kernel(definition: Mapping[str, Any], arguments: Arguments, recording: MetaRecording) -> list[Call]:
    """Return calls of operators that compute the same as a kernel; raise `NoOverload` if there are none.

    arguments : arguments of one workload by name
    """
    kind, reference = definition.get("op_type"), definition.get("reference")
    text = reference if isinstance(reference, str) else ""
    call = _call_of_reference(text, arguments)
    if call is None and isinstance(kind, str) and kind in KERNELS:
        call = KERNELS[kind](arguments, text)
    if call is not None:
        return [call]
    try:
        return [_converted(item) for _, item in TensorProgram(text, recording).calls("run", arguments)]
    except ValueError as error:
        name = kind if isinstance(kind, str) else "kernel"
        raise NoOverload(f"no operator of torch corresponds to this {name[:60]} ({error})") from error


def _converted(item: Recorded | Unconverted) -> Call:
    if isinstance(item, Unconverted):
        raise ValueError(f"{item.op}: {item.reason}")
    return item.op, list(item.args), item.kwargs


def _gemm(arguments: Arguments, reference: str) -> Call | None:
    """Return a call for the product of A (M, K) and the transpose of B (N, K), or None for other `arguments`."""
    match list(arguments.values()):
        case [TensorSpec() as left, TensorSpec() as right] if len(left.shape) == len(right.shape) == 2:
            return ("aten.linear.default", [left, right], {}) if left.shape[1] == right.shape[1] else None
    return None


def _rmsnorm(arguments: Arguments, reference: str) -> Call | None:
    """Return a call of RMS normalization: rows divided by their root mean square, times a weight.

    Return None for a kernel that adds another tensor before it normalizes.
    """
    tensors = [value for value in arguments.values() if isinstance(value, TensorSpec)]
    numbers = [value for value in arguments.values() if isinstance(value, float)]
    if len(tensors) != 2 or len(numbers) + 2 != len(arguments) or len(numbers) > 1:
        return None
    rows, weight = tensors
    if not rows.shape or weight.shape != rows.shape[-1:]:
        return None
    written = EPSILON.search(reference)
    try:
        epsilon = numbers[0] if numbers else float(written[1]) if written else None
    except ValueError:
        epsilon = None
    return "aten.rms_norm.default", [rows, list(weight.shape), weight, epsilon], {}


# functions that return the operator call for a kernel, by kind of kernel
KERNELS: dict[str, Callable[[Arguments, str], Call | None]] = {"gemm": _gemm, "rmsnorm": _rmsnorm}


def _call_of_reference(text: str, arguments: Arguments) -> Call | None:
    """Return the call in a reference that only calls one operator, such as `def run(x): return
    torch.ops.aten.relu.default(x)`, or None for any other text.
    """
    if len(text) > MOST_TEXT or "torch.ops." not in text:
        return None
    try:
        body = [item for item in ast.parse(text).body if not isinstance(item, ast.Import)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    match body:
        case [ast.FunctionDef(name="run", body=[ast.Return(value=ast.Call() as node)])]:
            path = ast.unparse(node.func).split(".") if _is_path(node.func) else []
        case _:
            return None
    if len(path) != 5 or path[:2] != ["torch", "ops"]:
        return None
    try:
        kwargs = {word.arg or "": _value(word.value, arguments) for word in node.keywords}
        return ".".join(path[2:]), [_value(item, arguments) for item in node.args], kwargs
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _is_path(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _value(node: ast.expr, arguments: Arguments) -> Any:
    match node:
        case ast.Name(id=name) if name in arguments:
            return arguments[name]
        case ast.List(elts=items):
            return [_value(item, arguments) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_value(item, arguments) for item in items)
    return literal(node)
