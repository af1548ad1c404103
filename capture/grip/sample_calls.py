"""The calls of a sample in its folder: a trace, and whole values beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch

from opgrip.capture.grip.compare import Sketch
from opgrip.capture.grip.copies import isolate_from_program
from opgrip.capture.grip.gripped import Gripped, GrippedCall
from opgrip.capture.grip.objects import take
from opgrip.capture.program.environment import describe_environment
from opgrip.capture.signatures.fitting import Fitter
from opgrip.capture.signatures.full_values import FullValues
from opgrip.capture.signatures.signatures import describe_call
from opgrip.errors import UserError, one_line
from opgrip.traces import Trace, load
from opgrip.traces.io.sample_folder import CALLS
from opgrip.traces.io.tensor_file import HEADER_FIELD
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.arguments import DTYPES, tensors
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

VALUES = "calls.safetensors"

WHOLE_BYTES = 64 << 20
"""Whole values of one sample; of the calls beyond, the models of values are kept and what their results look like."""


def write_calls(folder: Path, gripped: Gripped, most_bytes: int = WHOLE_BYTES) -> None:
    """Write a sample's calls into its folder.

    Parameters
    ----------
    most_bytes : of whole values

    Raises
    ------
    UserError : if the file exists
    """
    full = FullValues(folder / VALUES, most_bytes=most_bytes)
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
    """Makes the records of calls, one after the other on a clock of their own."""

    def __init__(self, pend: Callable[[Record], None], full: FullValues) -> None:
        self.fitter = Fitter(pend, count().__next__)
        self.fitter.full = full
        self.start_ns = 0
        self._contexts: list[dict[str, Any]] = []

    def records(self, number: int, name: str, call: GrippedCall) -> Iterator[Record]:
        """The records of a call, but those of values, which are pended before."""
        # first, as there may be no room for the values of all that follows
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
        """A live value as a trace holds it, with its values."""
        tree = take(value).tree
        (described,), _ = describe_call((tree,), {}, lambda place: self._fit)
        return described

    def _fit(self, tensor: torch.Tensor) -> int | None:
        with isolate_from_program():
            return self.fitter.fit(FUNCTION, "", tensor.detach().cpu())


def recorded_calls(folder: Path, classes: Mapping[str, Any]) -> list[GrippedCall]:
    """The calls that `write_calls` wrote, with live arguments and results.

    Nothing that the files name is imported. Where a call's whole values are not there, its arguments are drawn from the
    models of them, its results are a `Sketch`, and `after` is not known.

    Parameters
    ----------
    classes : what arguments' classes and functions are found in by name, such as the namespace of the sample's module

    Raises
    ------
    UserError : where the files are not there, or a class is not given
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
        """One call."""
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
    """The block runs under the settings that a call ran under, and draws the random numbers that it drew."""
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
