"""Recorded calls of a sample: functions that write, read, repeat and compare them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch

from opgrip.capture.grip.copies import isolate_from_program
from opgrip.capture.grip.gripped import Gripped, GrippedCall
from opgrip.capture.grip.objects import take
from opgrip.capture.program.environment import describe_environment
from opgrip.capture.signatures.fitting import Fitter
from opgrip.capture.signatures.full_values import FullValues
from opgrip.capture.signatures.signatures import describe_call
from opgrip.errors import UserError, one_line
from opgrip.traces import Trace, load
from opgrip.traces.io.sample_folder import CALLS, open_sample
from opgrip.traces.io.tensor_file import HEADER_FIELD
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.arguments import DTYPES, Opaque, TensorSpec, tensors
from opgrip.traces.schema.python_objects import (
    ArraySpec,
    ModuleSpec,
    ObjectSpec,
    ScalarSpec,
    SharedSpec,
    children,
    outline,
)
from opgrip.traces.schema.records import (
    FUNCTION,
    Calls,
    Context,
    Effects,
    End,
    Header,
    Record,
    Scope,
    Signature,
    Thread,
    listed,
)
from opgrip.traces.table.live_calls import LiveArguments


@dataclass(frozen=True, slots=True)
class Sketch:
    """Results of a call without values, as nested specs with shapes and dtypes."""

    tree: Any


def difference(expected: Any, got: Any) -> str | None:
    """Return one line that describes how two results of a call differ, or None if they do not.

    Tensors, arrays and floats are compared with the tolerances of `torch.testing.assert_close`; nan equals nan. Fields
    of objects are ignored if a sample cannot hold their values.

    expected : live values, or a `Sketch`; with a sketch, only types of numbers, shapes and dtypes are compared
    """
    with isolate_from_program():
        tree = expected.tree if isinstance(expected, Sketch) else take(expected).tree
        return _difference(tree, take(got).tree, "the result", not isinstance(expected, Sketch))


def _difference(expected: Any, got: Any, where: str, values: bool) -> str | None:
    if isinstance(expected, TensorSpec | torch.Tensor) and isinstance(got, torch.Tensor):
        return _of_tensors(expected, got, where)
    if type(expected) is type(got) and type(expected) in _NUMBERS and not values:
        return None
    if type(expected) is not type(got):
        return f"{where} is {_short(got)}, not {_short(expected)}"
    if isinstance(expected, float | complex):
        return None if _close(expected, got) else f"{where} is {got!r}, not {expected!r}"
    if isinstance(expected, ScalarSpec) and expected.dtype == got.dtype:
        return None if _close(expected.value, got.value) else f"{where} is {got.value!r}, not {expected.value!r}"
    if isinstance(expected, set | frozenset):
        return None if expected == got else f"{where} is {_short(got)}, not {_short(expected)}"
    inner, its = _inner(expected), _inner(got)
    if inner is None or its is None:
        return None if repr(expected) == repr(got) else f"{where} is {_short(got)}, not {_short(expected)}"
    if inner.keys() != its.keys() or _outline(expected) != _outline(got):
        return f"{where} is {_short(got)}, not {_short(expected)}"
    for name, item in inner.items():
        place = where if name == "" else f"{where}{name}"
        if (inner_difference := _difference(item, its[name], place, values)) is not None:
            return inner_difference
    return None


_NUMBERS = (bool, int, float, complex, ScalarSpec)


def _inner(value: Any) -> dict[str, Any] | None:
    match value:
        case dict():
            return {f"[{key!r}]": item for key, item in value.items()}
        case list() | tuple():
            return {f"[{place}]": item for place, item in enumerate(value)}
        case ObjectSpec(_, fields, content):
            held = {f".{name}": item for name, item in fields.items() if not isinstance(item, Opaque)}
            return held if content is None else held | {"": content}
        case ModuleSpec():
            groups = (value.parameters, value.buffers, value.modules, value.fields)
            named = {f".{name}": item for group in groups for name, item in group.items()}
            return {name: item for name, item in named.items() if not isinstance(item, Opaque)}
    inside = children(value)
    return None if inside is None else {"": inside[0]}


def _outline(value: Any) -> Sequence[object]:
    # only the class: fields are compared by their contents
    return outline(value)[:1]


def _of_tensors(expected: TensorSpec | torch.Tensor, got: torch.Tensor, where: str) -> str | None:
    forms = [(tuple(item.shape), item.dtype) for item in (expected, got)]
    if forms[0] != forms[1]:
        return f"{where} is {_short(got)}, not {_short(expected)}"
    if isinstance(expected, TensorSpec):
        return None
    try:
        torch.testing.assert_close(got.cpu(), expected.cpu(), equal_nan=True)
    except AssertionError as error:
        return f"{where}: {' '.join(str(error).split())}"
    return None


def _close(expected: complex, got: complex) -> bool:
    if expected == got or repr(expected) == repr(got):
        return True
    if isinstance(expected, bool | int) or isinstance(got, bool | int):
        return False
    return not math.isnan(abs(expected)) and abs(expected - got) <= 1e-6 + 1.3e-6 * abs(expected)


def _short(value: Any) -> str:
    if isinstance(value, TensorSpec | torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, ArraySpec):
        return f"an array of {_short(value.tensor)}"
    if isinstance(value, ObjectSpec | ModuleSpec):
        return f"a {value.cls.partition(':')[2]}"
    if isinstance(value, SharedSpec):
        return _short(value.value)
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


VALUES = "calls.safetensors"

# maximum number of bytes of full values in one sample; further calls keep only value models and metadata of results
WHOLE_BYTES = 64 << 20


def write_calls(folder: Path, gripped: Gripped) -> None:
    """Write the recorded calls of a gripped function into its sample's folder.

    Raises UserError: a file exists already, or safetensors is not installed.
    """
    full = FullValues(folder / VALUES, most_bytes=WHOLE_BYTES)
    records: list[Record] = [Thread(0, "MainThread")]
    writing = _Writing(records.append, full)
    for number, call in enumerate(gripped.calls):
        records += writing.records(number, gripped.name, call)
    lost = listed(writing.fitter.without_values)
    end = End(len(gripped.calls), len(gripped.calls), writing.start_ns, without_values=lost)
    fields = {"command": [], "sample": gripped.name, "function": gripped.entry, HEADER_FIELD: VALUES}
    full.finish()
    if full.failure is not None:
        raise UserError(f"{folder / VALUES} could not be written", one_line(full.failure)) from full.failure
    with TraceWriter(folder / CALLS, Header(describe_environment() | fields)) as writer:
        for record in (*records, end):
            writer.write(record)


class _Writing:
    def __init__(self, pend: Callable[[Record], None], full: FullValues) -> None:
        self.fitter = Fitter(pend, count().__next__)
        self.fitter.full = full
        self.start_ns = 0
        self._contexts: list[dict[str, Any]] = []

    def records(self, number: int, name: str, call: GrippedCall) -> Iterator[Record]:
        # the random state comes first, because the values of the rest may exhaust the limit
        state = None if call.random_state is None else self._describe(call.random_state)
        args, kwargs = self._describe((call.args, call.kwargs))
        yield Signature(number, FUNCTION, name, args, kwargs, self._describe(call.results))
        after = None if call.after is None else self._describe(call.after)
        yield Effects(number, call.operators, call.operator_ns, after, state)
        if call.settings not in self._contexts:
            self._contexts.append(call.settings)
            context = len(self._contexts) - 1
            yield Context(context, call.settings)
            yield Scope(context, "", "", "forward", context=context)
        scope = self._contexts.index(call.settings)
        yield Calls(0, [number], [scope], [self.start_ns], [call.duration_ns])
        self.start_ns += call.duration_ns

    def _describe(self, value: Any) -> Any:
        tree = take(value).tree
        (described,), _ = describe_call((tree,), {}, lambda place: self._fit)
        return described

    def _fit(self, tensor: torch.Tensor) -> int | None:
        with isolate_from_program():
            return self.fitter.fit(FUNCTION, "", tensor.detach().cpu())


def recorded_calls(folder: Path, classes: Mapping[str, Any]) -> list[GrippedCall]:
    """Return the calls that `write_calls` wrote into a folder, with live arguments and results.

    Nothing that the files name is imported. If the full values of a call are missing, its arguments are drawn from
    value models, its `results` are a `Sketch`, and its `after` is None.

    classes : classes and functions of the arguments by name, such as the namespace of the sample's module
    """
    trace = load(folder / CALLS, partial=False, unbounded=True)
    reading = _Reading(trace, classes)
    return [reading.call(signature) for signature in trace.signatures]


class _Reading:
    def __init__(self, trace: Trace, classes: Mapping[str, Any]) -> None:
        self._trace = trace
        self._live = LiveArguments(trace, classes)
        calls = trace.calls.drop_duplicates("signature").set_index("signature")
        self._duration = calls["duration_ns"].to_dict()
        context_of = {scope.number: scope.context for scope in trace.scopes}
        self._context = {number: context_of.get(scope) for number, scope in calls["scope"].to_dict().items()}

    def call(self, signature: Signature) -> GrippedCall:
        number = signature.number
        effects = self._trace.effects.get(number, Effects(number, 0, 0))
        arguments = (signature.args, signature.kwargs)
        whole = self._is_whole([arguments, signature.outputs, effects.after])
        args, kwargs = self._live.make(arguments)
        return GrippedCall(
            args,
            kwargs,
            self._live.make(signature.outputs) if whole else Sketch(signature.outputs),
            self._live.make(effects.after) if whole else None,
            self._live.make(effects.random_state) if self._is_whole(effects.random_state) else None,
            effects.operators,
            effects.operator_ns,
            self._duration.get(number, 0),
            self._trace.contexts.get(self._context.get(number) or 0, {}),
        )

    def _is_whole(self, tree: Any) -> bool:
        return all(map(self._live.is_whole, tensors(tree)))


@contextmanager
def as_it_ran(call: GrippedCall) -> Iterator[None]:
    """Run the block with the random state, default dtype, autocast and gradient mode of a recorded call.

    Other recorded settings, such as the number of threads, stay as they are.
    """
    settings = call.settings
    with ExitStack() as stack:
        if call.random_state is not None:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.set_rng_state(call.random_state)
        dtype = DTYPES.get(str(settings.get("default_dtype")))
        if dtype is not None and dtype is not torch.get_default_dtype():
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        for device, _, name in (item.partition(":") for item in str(settings.get("autocast") or "").split(",") if item):
            stack.enter_context(torch.autocast(device, DTYPES.get(name)))
        if settings.get("inference") is True:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(settings.get("grad") is not False))
        yield


class RecordedSample:
    """A sample written by `grip`. The constructor runs the sample's code, so use it only for trusted folders."""

    def __init__(self, folder: str | Path) -> None:
        self._opened = open_sample(Path(folder))

    @cached_property
    def calls(self) -> list[GrippedCall]:
        return recorded_calls(self._opened.folder, self._opened.classes)

    def difference(self, call: GrippedCall) -> str | None:
        """Run a recorded call again; return a line on how it differs from the recording, or None if it does not."""
        with as_it_ran(call):
            results = self._opened.function(*call.args, **call.kwargs)
        line = difference(call.results, results)
        if line is None and call.after is not None:
            line = difference(call.after, (call.args, call.kwargs))
        return line
