"""Traces of torch.profiler with shapes, the JSON of `export_chrome_trace`, as traces of operators.

Of the events of operators, those are taken that a capture would record: below composite operators, which only call
others, the outermost ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any

from opgrip.errors import FormatError, UserError
from opgrip.traces.analysis.timeline import timeline_lines
from opgrip.traces.formats.building import NO_GRADIENTS, NO_VALUES, RecordBuilder
from opgrip.traces.formats.json_members import CutText, TooLong, members
from opgrip.traces.formats.overloads import Bound, NoOverload
from opgrip.traces.formats.profiler_arguments import bind_inputs
from opgrip.traces.formats.profiler_events import DeviceWork, EventTable, OperatorCall, Slice, calls_of
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, Losses, formats
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import Kernels, Record
from opgrip.traces.table.trace import Trace

DEFAULTS = (
    NO_VALUES,
    NO_GRADIENTS,
    "results: the file has none",
    "devices of tensors: the file has none, so they are where the file has kernels, else on the processor",
    "types of tensors in lists: the file has none, so they are as the call's others, else float32",
    "modules: the file names them by class and number, if recorded with_stack=True",
)
MOST_EVENTS = 10_000_000
"""Of a file, in 48 bytes each."""
EVENTS = "traceEvents"
MARKS = (b'"traceEvents"', b'"baseTimeNanoseconds"')


def recognizes(head: Head) -> bool:
    """Whether it is JSON with a list of events."""
    start = head.start.lstrip()
    if start.startswith(b"{"):
        # the timeline of a trace of ours has no shapes as torch's has them, and says so when it is read
        return any(mark in head.start for mark in MARKS) or (
            b'"schemaVersion"' in start and b'"deviceProperties"' in start
        )
    return start.startswith(b"[") and b'"ph"' in head.start and b'"cat"' in head.start


def read(file: ForeignFile) -> Iterator[Record]:
    """The calls of each thread, with their times, and their kernels' where the file has them."""
    table, facts = _events_of(file)
    if not table.operators:
        raise UserError(
            f"{file.path} holds no operators", "profile with activities=[ProfilerActivity.CPU, ...], record_shapes=True"
        )
    if not table.shapes:
        raise UserError(f"{file.path} has no shapes", "profile with record_shapes=True")
    device = f"cuda:{table.devices.most_common(1)[0][0]}" if table.devices else "cpu"
    builder = RecordBuilder("chrome", file.losses, facts, is_timed=True)
    adder = _Adder(builder, device, file.losses)
    kernels: dict[int, DeviceWork] = {}
    for thread, events in table.threads():
        for call in calls_of(events, table.work, file.losses.skip):
            signature = adder.add(call, thread)
            if signature is not None and call.work is not None:
                kernels.setdefault(signature, DeviceWork(Counter(), Counter())).add(call.work)
            yield from builder.ready()
    for signature, work in kernels.items():
        names = list(work.launches)
        launches, times = ([counts[name] for name in names] for counts in (work.launches, work.device_ns))
        yield Kernels(signature, names, launches, times)
    yield from builder.end()


def _events_of(file: ForeignFile) -> tuple[EventTable, dict[str, Any]]:
    """The file's events, and what it says of the program."""
    table = EventTable()
    facts: dict[str, Any] = {}
    try:
        # torch writes some arguments of kernels twice
        for name, form in members(file.chunks(), EVENTS, file.unbounded, strict=False):
            if name != EVENTS:
                if name in ("host_name", "traceName") and isinstance(form, str):
                    facts[name] = form[:1000]
                continue
            try:
                table.add(form)
            except (ValueError, OverflowError, TypeError) as error:
                file.losses.skip("?", str(error)[:200])
            if len(table) > MOST_EVENTS and not file.unbounded:
                raise file.refusal(f"it holds more than {MOST_EVENTS:,} events")
    except TooLong:
        raise file.refusal("an event is no JSON, or longer than 16 MB") from None
    except CutText:
        raise file.damage("it is cut, or no JSON") from None
    except FormatError as error:
        raise file.damage(str(error)[:200]) from error
    return table, {"profiled": facts} if facts else {}


class _Adder:
    """Adds calls; events that differ in their times alone are read once.

    Parameters
    ----------
    device : that the program ran on
    """

    def __init__(self, builder: RecordBuilder, device: str, losses: Losses) -> None:
        self._builder, self._device, self._losses = builder, device, losses
        self._bound: dict[Slice, Bound | str] = {}
        self._forward_scopes: dict[int, int] = {}

    def add(self, call: OperatorCall, thread: str) -> int | None:
        """Add a call; the number of its signature, None where the file does not tell what it took."""
        event, scope, work = call.event, call.scope, call.work
        bound = self._bound.get(event.slice)
        if bound is None:
            bound = self._bound[event.slice] = self._bind(event.slice)
        if isinstance(bound, str):
            self._losses.skip(event.slice.name.replace("::", "."), bound)
            return None
        if call.forward >= 0:
            scope = replace(scope, forward=self._forward_scopes.get(call.forward))
        elif event.sequence >= 0:
            self._forward_scopes[event.sequence] = self._builder.add_scope(scope)
        return self._builder.add_call(
            bound.op,
            bound.args if work is None else _with_copied_from(bound.args, work),
            bound.kwargs,
            scope=scope,
            thread=thread,
            start_ns=event.start_ns,
            duration_ns=event.end_ns - event.start_ns,
            device_ns=-1 if work is None else sum(work.device_ns.values()),
        )

    def _bind(self, item: Slice) -> Bound | str:
        """The call of an overload, or why it is none."""
        if item.inputs is None:
            return "the file has no shapes of it"
        try:
            return bind_inputs(item.name, item.inputs, self._device)
        except NoOverload as error:
            return str(error)


def _with_copied_from(args: tuple[Any, ...], work: DeviceWork) -> tuple[Any, ...]:
    """The arguments of a copy from the processor or to it, where the tensor is that lies there."""
    places = [place for place, value in enumerate(args) if isinstance(value, TensorSpec)]
    names = " ".join(work.launches)
    if "HtoD" in names and places:
        there = places[-1]
    elif "DtoH" in names and len(places) > 1:
        there = places[0]
    else:
        return args
    return tuple(replace(value, device="cpu") if place == there else value for place, value in enumerate(args))


def write(trace: Trace, file: IO[bytes], losses: Losses) -> None:
    """The timeline of a trace, for people: it has the shapes of tensors, in words, and no other arguments."""
    file.writelines(line.encode() for line in timeline_lines(trace))
    for number, op in trace.calls["op"].items():
        losses.lose(int(number), str(op), "arguments but for the shapes of tensors")  # type: ignore[call-overload]


formats.register("chrome")(
    Format(
        "torch.profiler's traces with shapes, as export_chrome_trace writes them; written as a timeline",
        recognizes,
        read,
        write,
        defaults=DEFAULTS,
    )
)
