"""Sample calls of operators: how they are generated, resized and tried."""

from __future__ import annotations

import hashlib
import json
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product, zip_longest
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from opgrip.capture.models.operators.torch_tables import CUSTOM, SCHEMA, Arguments, OperatorEntry, is_custom, name_of
from opgrip.capture.signatures.signatures import call_key
from opgrip.capture.torch_compat.compiler_private import OrderlyMode
from opgrip.capture.torch_compat.torch_private import without_functions, without_modes
from opgrip.cli.command import counted
from opgrip.cli.output_files import whole_file
from opgrip.errors import one_line
from opgrip.platform.sandbox import TIMEOUT, Child, Ended, Heartbeat, write_message
from opgrip.traces.schema.arguments import leaves, map_leaves
from opgrip.traces.schema.tensor_specs import DTYPES, plain_name

MOST_REASON = 200  # maximum number of characters of the reason for a failed call


@dataclass(slots=True)
class Coverage:
    entries: int = 0
    samples: int = 0
    operators: set[Any] = field(default_factory=set)
    failures: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    uncovered: dict[str, str] = field(default_factory=dict)

    def fail(self, name: str, dtype: str, error: BaseException | str) -> None:
        reason = error if isinstance(error, str) else one_line(error)
        self.failures[name, dtype, reason[:MOST_REASON]] += 1

    def lines(self, path: Path | None) -> Iterator[str]:
        names = {str(function) for function in self.operators}
        yield (
            f"{counted(len(names), 'operator')} by {counted(self.samples, 'sample')} of "
            f"{counted(self.entries, 'entry', 'entries')}"
        )
        missing = []
        if self.failures:
            missing.append(f"{counted(self.failures.total(), 'sample')} failed")
        if self.uncovered:
            missing.append(f"{counted(len(self.uncovered), 'operator has', 'operators have')} no sample")
        if missing:
            where = f"{path} names them" if path is not None else "--uncovered FILE names them"
            yield f"{', '.join(missing)}: {where}"

    def write(self, path: Path, force: bool) -> None:
        form = {
            "operators": sorted(map(str, self.operators)),
            "failed": [
                {"entry": name, "dtype": dtype, "reason": reason, "samples": count}
                for (name, dtype, reason), count in sorted(self.failures.items())
            ],
            "uncovered": [{"op": op, "reason": reason} for op, reason in sorted(self.uncovered.items())],
        }
        with whole_file(path, force) as file:
            file.write(json.dumps(form, indent=1).encode() + b"\n")


@contextmanager
def seeded(*parts: object) -> Iterator[None]:
    """Seed the random generators of torch, numpy and Python with a hash of `parts` for the `with` block."""
    seed = int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big")
    of_numpy, of_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)


LARGE_ELEMENTS = 1 << 20  # number of elements of the largest tensor in a large sample
# maximum number of elements of any tensor in a large sample, because tensors with more dimensions grow faster
MOST_ELEMENTS = 1 << 24
RANDOM_SIZES = (2, 96)  # smallest and largest size of a dimension that is drawn at random
CUBIC = frozenset({"linalg", "gemm", "attention"})  # categories whose computing time grows faster than their tensors
CUBIC_ELEMENTS = 1 << 18
# categories of which only the batch size is enlarged, because other sizes belong to kernels and channels and must match
OF_BATCH = frozenset({"convolution", "pooling", "normalization", "resizing"})

Sizes = Callable[[int], int]


def enlarge(entry: OperatorEntry, sample: Arguments) -> Iterator[Arguments]:
    largest = max(_dense_tensors(sample), key=lambda tensor: tensor.numel(), default=None)
    if largest is None or not largest.numel():
        return
    elements = CUBIC_ELEMENTS if entry.categories & CUBIC else LARGE_ELEMENTS
    growing = sum(size > 1 for size in largest.shape)
    if growing and not entry.categories & OF_BATCH:
        factor = round((elements / largest.numel()) ** (1 / growing))
        if factor > 1:
            yield from _resized(sample, lambda size: size * factor if size > 1 else size)
    yield from _with_batch(sample, max(1, elements // largest.numel()))


def draw(entry: OperatorEntry, sample: Arguments) -> Iterator[Arguments]:
    """Yield copies of a sample with random sizes, if its sizes can change."""
    drawn: dict[int, int] = {}

    def size_of(size: int) -> int:
        return drawn.setdefault(size, random.randint(*RANDOM_SIZES)) if size > 1 else size

    if not entry.categories & OF_BATCH:
        yield from _resized(sample, size_of)
    yield from _with_batch(sample, random.randint(*RANDOM_SIZES))


# functions that resize a sample, by value of `--shapes`
RESIZERS: Mapping[str, Callable[[OperatorEntry, Arguments], Iterator[Arguments]]] = {"large": enlarge, "random": draw}


def _resized(sample: Arguments, size_of: Sizes) -> Iterator[Arguments]:
    tensors = list(tensors_in(list(sample)))
    if len(tensors) != len(list(_dense_tensors(sample))):
        return
    if any(prod(map(size_of, tensor.shape)) > MOST_ELEMENTS for tensor in tensors):
        return
    yield _map_tensors(sample, lambda tensor: grown(tensor, tuple(map(size_of, tensor.shape))))


def _with_batch(sample: Arguments, factor: int) -> Iterator[Arguments]:
    first = next(_dense_tensors(sample), None)
    if first is None or not first.dim() or factor < 2 or first.numel() * factor > MOST_ELEMENTS:
        return
    larger = grown(first, (first.shape[0] * factor, *first.shape[1:]))
    yield _map_tensors(sample, lambda tensor: larger if tensor is first else tensor)


def grown(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of another shape with its values repeated or cut, so that indices and masks stay valid."""
    values = tensor.detach().resolve_conj().resolve_neg()
    for dim, size in enumerate(shape):
        if size > values.shape[dim] and values.shape[dim]:
            copies = -(-size // values.shape[dim])
            values = torch.cat([values] * copies, dim)
        values = values.narrow(dim, 0, min(size, values.shape[dim]))
    if not values.is_contiguous() or values.data_ptr() == tensor.data_ptr():
        values = values.clone(memory_format=torch.contiguous_format)
    return values.requires_grad_(tensor.requires_grad)


def _map_tensors(sample: Arguments, function: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
    def change(leaf: Any) -> Any:
        return function(leaf) if isinstance(leaf, torch.Tensor) else leaf

    args, kwargs = map_leaves(change, sample)
    return args, kwargs


def _dense_tensors(sample: Arguments) -> Iterator[torch.Tensor]:
    return (
        tensor
        for tensor in tensors_in(list(sample))
        if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    )


# torch's message for an operator that is not differentiable
NO_DERIVATIVE = re.compile(r"derivative for .* is not implemented")


@dataclass(frozen=True, slots=True)
class SampleTrial:
    """Results of running a sample call once before the capture.

    backward : error of the backward pass, empty if there was none; None for a call without gradients
    """

    calls: frozenset[Hashable]
    operators: frozenset[Any]
    backward: str | None


class Probe(OrderlyMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: set[Hashable] = set()
        self.operators: set[Any] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with without_modes(), without_functions():
            self.calls.add(hash(call_key(func, args, kwargs or {})))
            self.operators.add(func)
            return func(*args, **(kwargs or {}))


def try_call(function: Callable[..., Any], arguments: Arguments, with_gradients: bool) -> SampleTrial:
    probe = Probe()
    with probe:
        result = function(*arguments[0], **arguments[1])
    backward = None
    if with_gradients:
        try:
            with probe:
                backward = None if run_backward(result, arguments) is None else ""
        except Exception as error:
            # an operator without a derivative has no backward pass to record
            backward = None if NO_DERIVATIVE.search(str(error)) else f"{type(error).__name__}: {error}"
    return SampleTrial(frozenset(probe.calls), frozenset(probe.operators), backward)


def run_backward(result: Any, arguments: Arguments) -> Any:
    outputs = [item for item in tensors_in(result) if item.requires_grad]
    inputs = [item for item in tensors_in(list(arguments)) if item.requires_grad]
    if not outputs or not inputs:
        return None
    with without_modes(), without_functions():
        ones = [torch.ones_like(output) for output in outputs]
    return torch.autograd.grad(outputs, inputs, ones, allow_unused=True)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def spread(samples: Iterable[Arguments]) -> Iterator[Arguments]:
    """Yield samples in an order that alternates between types of arguments."""
    tables: tuple[dict[Hashable, list[Arguments]], ...] = ({}, {}, {})
    for sample in samples:
        sizes = [tensor.numel() for tensor in tensors_in(list(sample))]
        rank = 2 if 0 in sizes else 0 if any(size > 1 for size in sizes) else 1
        tables[rank].setdefault(_form(sample), []).append(sample)
    for table in tables:
        for round_ in zip_longest(*table.values()):
            yield from (sample for sample in round_ if sample is not None)


def _form(sample: Arguments) -> Hashable:
    args, kwargs = sample
    return (*map(_kind, args), *((name, _kind(value)) for name, value in sorted(kwargs.items())))


def _kind(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dim() == 0, value.dtype, value.layout)
    if isinstance(value, list | tuple):
        return (type(value).__name__, frozenset(map(_kind, value)))
    return value if isinstance(value, bool | str) else type(value).__name__


# maximum number of samples that are tried for each one to be run, before the other samples of a dtype are skipped
TRIALS = 3

# function that yields a sample in other shapes, in the order in which to try them
Resize = Callable[[OperatorEntry, Arguments], Iterator[Arguments]]


class SampleScope(nn.Module):
    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


@dataclass(slots=True)
class SampleRunner:
    device: str
    seed: int
    most: int
    coverage: Coverage
    resize: Resize | None = None
    calls: set[Hashable] = field(default_factory=set)

    def run(self, entry: OperatorEntry, scope: nn.Module) -> None:
        self.coverage.entries += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                dtypes, differentiable = entry.dtypes(self.device), entry.differentiable(self.device)
            except Exception as error:
                self.coverage.fail(entry.name, "", error)
                return
            for dtype in dtypes:
                with seeded(self.seed, entry.name, dtype):
                    self._run_dtype(entry, dtype, dtype in differentiable, scope)

    def operators_of(self, entries: Iterable[OperatorEntry]) -> set[Any]:
        operators: set[Any] = set()
        for entry in entries:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with suppress(Exception):
                    dtype = entry.dtypes(self.device)[0]
                    with_gradients = dtype in entry.differentiable(self.device)
                    with seeded(self.seed, entry.name, dtype):
                        samples = spread(entry.samples(self.device, dtype, with_gradients))
                        for sample in islice(samples, TRIALS):
                            operators |= try_call(entry.function, sample, with_gradients).operators
        return operators

    def _run_dtype(self, entry: OperatorEntry, dtype: torch.dtype, with_gradients: bool, scope: nn.Module) -> None:
        named = plain_name(dtype)
        try:
            with without_modes(), without_functions():
                samples = list(spread(entry.samples(self.device, dtype, with_gradients)))
            if self.resize is not None:
                sized = [sample for sample in samples if any(tensor.numel() > 1 for tensor in tensors_in(list(sample)))]
                samples = sized or samples
        except Exception as error:
            self.coverage.fail(entry.name, named, error)
            return
        ran = 0
        for sample in samples if not self.most else islice(samples, TRIALS * self.most):
            ran += self._run_sample(entry, sample, named, with_gradients, scope)
            if self.most and ran == self.most:
                break
        if entry.in_place is not None:
            self._run_in_place(entry, entry.in_place, dtype, scope)

    def _run_sample(
        self, entry: OperatorEntry, sample: Arguments, dtype: str, with_gradients: bool, scope: nn.Module
    ) -> bool:
        with without_modes(), without_functions():
            tries = [sample] if self.resize is None else [*self.resize(entry, sample), sample]
        for arguments in tries:
            is_new = self._try_call(entry, entry.function, arguments, dtype, with_gradients, scope)
            if not isinstance(is_new, Exception):
                return is_new
        assert isinstance(is_new, Exception), "the loop ran"
        self.coverage.fail(entry.name, dtype, is_new)
        return False

    def _run_in_place(
        self, entry: OperatorEntry, function: Callable[..., Any], dtype: torch.dtype, scope: nn.Module
    ) -> None:
        with without_modes(), without_functions():
            samples = list(islice(spread(entry.samples(self.device, dtype, False)), TRIALS))
        for sample in samples:
            # many in-place variants cannot hold the result of the sample
            if self._try_call(entry, function, sample, plain_name(dtype), False, scope) is True:
                return

    def _try_call(
        self,
        entry: OperatorEntry,
        function: Callable[..., Any],
        arguments: Arguments,
        dtype: str,
        with_gradients: bool,
        scope: nn.Module,
    ) -> bool | Exception:
        try:
            trial = try_call(function, arguments, with_gradients)
        except Exception as error:
            return error
        if trial.calls <= self.calls:
            return False
        scope(partial(_run, function, arguments, trial.backward == ""))
        self.calls |= trial.calls
        self.coverage.samples += 1
        self.coverage.operators |= trial.operators
        if trial.backward:
            self.coverage.fail(entry.name, dtype, f"backward: {trial.backward}")
        return True


def _run(function: Callable[..., Any], arguments: Arguments, with_gradients: bool) -> None:
    result = function(*arguments[0], **arguments[1])
    if with_gradients:
        run_backward(result, arguments)


TIMEOUT_S = 10.0  # time limit of a trial in seconds
ENDS = "it ends the process"
HANGS = "it takes too long"


def try_all(trials: Sequence[Callable[[], Any]]) -> Iterator[tuple[Any, str]]:
    """Run functions in child processes; yield the result of each, and its error or an empty string."""
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
    shape: tuple[int, ...]
    length: int
    values: Mapping[str, Any]
    device: str
    dtype: torch.dtype
    wants_grad: bool


def schema_entries(functions: Iterable[Any], seed: int) -> tuple[list[OperatorEntry], dict[str, str]]:
    """Return operators with samples that run on the CPU, and the reasons why others have no samples, by operator."""
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
    """Yield arguments with types from an operator's schema: tensors of one shape, small numbers, and lists."""
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
