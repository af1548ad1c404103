"""Sample calls generated from an operator's schema, and tried in a forked process, because a bad call may crash."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import Any

import torch

from opgrip.capture.models.operators.samples import seeded
from opgrip.capture.models.operators.torch_tables import CUSTOM, SCHEMA, Arguments, OperatorEntry, is_custom, name_of
from opgrip.errors import one_line
from opgrip.platform.heartbeat import Heartbeat
from opgrip.platform.sandbox import TIMEOUT, Child, Ended, write_message
from opgrip.traces.schema.tensor_specs import DTYPES, plain_name

TIMEOUT_S = 10.0  # time limit of a trial in seconds
ENDS = "it ends the process"
HANGS = "it takes too long"


def try_all(trials: Sequence[Callable[[], Any]]) -> Iterator[tuple[Any, str]]:
    """Yield, for each trial, its result converted to JSON types, and the reason why it failed or an empty string.

    Call this before the process starts an accelerator or a capture, because a fork inherits both.
    """
    done = 0
    while done < len(trials):
        for outcome in _try_from(trials, done):
            done += 1
            yield outcome


def _try_from(trials: Sequence[Callable[[], Any]], first: int) -> Iterator[tuple[Any, str]]:
    def run(source: int, output: int, heartbeat: Heartbeat) -> None:
        # thread pools do not survive a fork
        torch.set_num_threads(1)
        for number, trial in enumerate(trials[first:]):
            heartbeat.enter(number)
            try:
                value, reason = trial(), ""
                json.dumps(value)
            except Exception as error:
                value, reason = None, one_line(error)
            write_message(output, [value, reason])

    with Child(run, timeout_s=TIMEOUT_S) as child:
        remaining = len(trials) - first
        while remaining:
            received = child.receive()
            if isinstance(received, Ended):
                yield None, HANGS if received.status == TIMEOUT else ENDS
                return
            remaining -= len(received)
            yield from map(tuple, received)


# tensor shapes tried in turn, the same for all tensors of a call
SHAPES = ((4, 4), (2, 4, 8, 8), (3,), (2, 4, 8), (2, 4, 8, 8, 8), ())
FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.bool)
MOST_TRIALS = 150  # maximum number of samples tried per operator and dtype
# parts of argument names that suggest integer values
WHOLE_PARTS = ("ind", "offset", "length", "repeats", "target", "pivot", "seqlen", "label")
BOOL_PARTS = ("mask", "condition")
# values tried in turn for arguments without default, by kind of argument
VALUES: dict[str, tuple[Any, ...]] = {
    "IntType": (1, 0, 2),
    "SymIntType": (1, 0, 2),
    "FloatType": (0.5, 1.0),
    "NumberType": (1, 0.5),
    "ComplexType": (1.0,),
    "BoolType": (False, True),
    "SymBoolType": (False,),
}
LENGTHS = (2, 1, 3, 4)  # list lengths tried in turn


@dataclass(frozen=True, slots=True)
class Drawing:
    """Values from which the arguments of one sample call are generated.

    shape : shape of all tensors
    length : length of all lists
    values : value for each kind of argument, such as `IntType`
    wants_grad : True if floating-point tensors require gradients
    """

    shape: tuple[int, ...]
    length: int
    values: Mapping[str, Any]
    device: str
    dtype: torch.dtype
    wants_grad: bool


def schema_entries(functions: Iterable[Any], seed: int) -> tuple[list[OperatorEntry], dict[str, str]]:
    """Return operators with samples that run on the CPU, and by name the reasons why other operators have no
    samples.
    """
    reasons: dict[str, str] = {}
    candidates = []
    for function in functions:
        if reason := why_not(function):
            reasons[name_of(function)] = reason
        else:
            candidates.append(function)
    entries = []
    trials = [partial(find_samples, function, seed) for function in candidates]
    for function, (indices, reason) in zip(candidates, try_all(trials), strict=True):
        if indices:
            entries.append(schema_entry(function, {DTYPES[name]: index for name, index in indices.items()}))
        else:
            reasons[name_of(function)] = reason or "all samples of the operator fail"
    return entries, reasons


def schema_entry(function: Any, indices: Mapping[torch.dtype, int]) -> OperatorEntry:
    """Return an operator with one sample per dtype, generated from its schema.

    indices : by dtype, the index of the sample in `schema_samples`
    """

    def samples(device: str, dtype: torch.dtype, wants_grad: bool) -> Iterator[Arguments]:
        index = indices[dtype]
        yield from islice(schema_samples(function, device, dtype, wants_grad), index, index + 1)

    return OperatorEntry(
        name=name_of(function),
        categories=frozenset({CUSTOM if is_custom(function) else SCHEMA}),
        function=function,
        dtypes=lambda device: tuple(indices),
        differentiable=lambda device: frozenset(FLOATING),
        samples=samples,
    )


def find_samples(function: Any, seed: int) -> dict[str, int]:
    """Return, by name of dtype, the index of the first sample that runs; raise the error of one if none runs."""
    indices: dict[str, int] = {}
    failures: list[Exception] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (*FLOATING, *WHOLE):
            if dtype in FLOATING[1:] and not indices:
                # other dtypes fail in the same way
                continue
            try:
                indices[plain_name(dtype)] = _first_running(function, dtype, seed, indices.get(plain_name(FLOATING[0])))
            except NotImplementedError as error:
                if not indices and dtype is FLOATING[0] and "Could not run" in str(error):
                    raise
                failures.append(error)
            except Exception as error:
                failures.append(error)
    if not indices:
        raise failures[0]
    return indices


def _first_running(function: Any, dtype: torch.dtype, seed: int, only: int | None) -> int:
    failure: Exception | None = None
    with seeded(seed, name_of(function), dtype):
        samples = schema_samples(function, "cpu", dtype, dtype in FLOATING)
        for index, (args, kwargs) in enumerate(islice(samples, MOST_TRIALS if only is None else only + 1)):
            if only not in (None, index):
                continue
            try:
                function(*args, **kwargs)
                return index
            except Exception as error:
                failure = failure or error
                if "Could not run" in str(error):
                    break
    raise failure or RuntimeError("all samples of the operator fail")


def why_not(function: Any) -> str:
    """Return the reason why no arguments can be generated for an operator, or an empty string."""
    for argument in function._schema.arguments:
        *around, inner = _kinds(argument.type)
        has_values = inner in (*VALUES, "TensorType", "DeviceObjType") or "OptionalType" in around
        if not argument.has_default_value() and not has_values:
            return f"unsupported type of argument {argument.name}: {argument.type.annotation_str}"
    return ""


def schema_samples(function: Any, device: str, dtype: torch.dtype, wants_grad: bool) -> Iterator[Arguments]:
    """Yield arguments that an operator may accept, by its schema: tensors of the same shape, small numbers, and
    lists.
    """
    required = [item for item in function._schema.arguments if not item.has_default_value()]
    kinds = {kind for item in required for kind in _kinds(item.type)}
    numbers = sorted(kinds & VALUES.keys())
    lengths = LENGTHS if "ListType" in kinds else LENGTHS[:1]
    for *values, length, shape in product(*(VALUES[kind] for kind in numbers), lengths, SHAPES):
        drawing = Drawing(shape, length, dict(zip(numbers, values, strict=True)), device, dtype, wants_grad)
        item_values = [(item, _value(item.type, item.name, drawing)) for item in required]
        yield (
            tuple(value for item, value in item_values if not item.kwarg_only),
            {item.name: value for item, value in item_values if item.kwarg_only},
        )


def _value(kind: Any, name: str, drawing: Drawing) -> Any:
    match kind.kind():
        case "TensorType":
            return _tensor(name, drawing)
        case "ListType":
            return [_value(kind.getElementType(), name, drawing) for _ in range(drawing.length)]
        case "OptionalType":
            return _value(kind.getElementType(), name, drawing) if "TensorType" in _kinds(kind) else None
        case "DeviceObjType":
            return torch.device(drawing.device)
        case other:
            return drawing.values[other]


def _tensor(name: str, drawing: Drawing) -> torch.Tensor:
    shape, device = drawing.shape, drawing.device
    if any(part in name for part in BOOL_PARTS):
        return torch.rand(shape, device=device) > 0.5
    if any(part in name for part in WHOLE_PARTS):
        return torch.randint(0, 2, shape, device=device)
    if not drawing.dtype.is_floating_point:
        return torch.randint(0, 2, shape, device=device).to(drawing.dtype)
    return torch.rand(shape, device=device).to(drawing.dtype).requires_grad_(drawing.wants_grad)


def _kinds(kind: Any) -> tuple[str, ...]:
    name = kind.kind()
    return (name, *_kinds(kind.getElementType())) if name in ("ListType", "OptionalType") else (name,)
