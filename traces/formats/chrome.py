"""Reader of torch.profiler's traces with shapes (the JSON of `export_chrome_trace`), and writer of timelines."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import IO, Any

import numpy as np
import torch

from opgrip.cli.output_files import Damage
from opgrip.errors import FormatError, UserError
from opgrip.traces.analysis.timeline import timeline_lines
from opgrip.traces.formats.building import NO_GRADIENTS, NO_VALUES, RecordBuilder, tensor_of
from opgrip.traces.formats.operator_inputs import parse_literals
from opgrip.traces.formats.operator_schemas import (
    DTYPE_OF_ELEMENT,
    VALUE_OF_CODE,
    Bound,
    NotConverted,
    bind,
    op_of,
    schemas_of,
    without_defaults,
)
from opgrip.traces.formats.profiler_events import (
    EventInputs,
    EventTable,
    OperatorKernels,
    ProfiledCall,
    ProfilerEvent,
    Slice,
    calls_of,
)
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, Losses, formats
from opgrip.traces.io.json_stream import CutText, Repair, TooLong, members
from opgrip.traces.schema.arguments import TensorSpec, map_leaves, tensors
from opgrip.traces.schema.records import Kernels, Record
from opgrip.traces.table.trace import Trace

# dtypes by their C++ names, without quantized ones, whose scales the file does not contain
DTYPE_OF = {name: dtype for name, dtype in DTYPE_OF_ELEMENT.items() if not name.startswith("c10::q")}

_REAL = r"[+-]?(?:\d{1,20}(?:\.\d{0,40})?(?:[eE][+-]?\d{1,4})?|inf|nan)"
COMPLEX = re.compile(rf"\(?({_REAL})\+?({_REAL})[ij]\)?")
CUT = "..."
MOST_CHARACTERS = 4000


def bind_inputs(name: str, inputs: EventInputs, device: str) -> Bound:
    """Return the call that a profiler event describes."""
    schemas = schemas_of(name)
    if not schemas:
        bind(name, ())
    reasons: list[str] = []
    for schema in schemas:
        parameters = schema.arguments
        if len(parameters) > len(inputs):
            reasons.append(f"the file has only {len(inputs)} of its arguments")
        if len(parameters) != len(inputs):
            continue
        try:
            values = {
                item.name: map_leaves(
                    lambda leaf: replace(leaf, device=device) if isinstance(leaf, TensorSpec) else leaf,
                    _value(inputs, index, item),
                )
                for index, item in enumerate(parameters)
            }
            bound = bind(op_of(schema), (), values)
        except ValueError as error:
            reasons.append(str(error))
            continue
        return _on_device(without_defaults(bound), parameters, device)
    sorted_reasons = sorted(reasons, key=lambda reason: (not reason.startswith("the file"), "has only" in reason))
    raise NotConverted(sorted_reasons[0] if sorted_reasons else "no overload takes this number of arguments")


def _on_device(bound: Bound, parameters: Sequence[Any], device: str) -> Bound:
    makes = (
        any(item.name == "device" for item in parameters) and next(tensors([bound.args, bound.kwargs]), None) is None
    )
    if not makes or device == "cpu":
        return bound
    return replace(bound, kwargs={**bound.kwargs, "device": torch.device(device)})


def _value(inputs: EventInputs, index: int, parameter: Any) -> Any:
    kind, text, shape, stride = inputs.types[index], inputs.texts[index], inputs.shapes[index], inputs.strides[index]
    expected, optional = parameter.real_type, False
    if expected.kind() == "OptionalType":
        expected, optional = expected.getElementType(), True
    name = expected.kind()
    if name == "TensorType":
        return None if kind == "" and optional else _tensor(kind, shape, stride)
    if name == "ListType" and expected.getElementType().kind() in ("TensorType", "OptionalType"):
        # the types of its tensors are not in the file
        if kind != "TensorList" or not isinstance(shape, list) or not isinstance(stride, list):
            raise ValueError(f"the file has no value for the argument {parameter.name}")
        element = next((item for item in inputs.types if isinstance(item, str) and item in DTYPE_OF), "float")
        return [_tensor(element, *item) for item in zip(shape, stride, strict=True)]
    if not isinstance(text, str) or not isinstance(kind, str) or kind in DTYPE_OF or kind == "TensorList":
        raise ValueError(f"the argument {parameter.name} has the type {str(kind)[:40]!r}, not {name}")
    if text:
        return _parsed(text, expected, parameter.name)
    default = parameter.default_value if parameter.has_default_value() else None
    if name == "StringType" and isinstance(default, str):
        # the profiler writes no text for it
        return default
    # files without texts do not distinguish a list from None
    if optional and kind == "" and name != "StringType" and (inputs.has_texts or name != "ListType"):
        return None
    raise ValueError(f"the file has no value for the argument {parameter.name}")


def _tensor(kind: Any, shape: Any, stride: Any) -> TensorSpec:
    dtype = DTYPE_OF.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise ValueError(f"unsupported tensor type: {str(kind)[:40] or 'unknown'}")
    # older profilers write no strides
    return tensor_of(shape, dtype, stride)


def _parsed(text: str, expected: Any, name: str) -> Any:
    if CUT in text or len(text) > MOST_CHARACTERS:
        raise ValueError(f"the file contains only the beginning of the argument {name}")
    parts = COMPLEX.fullmatch(text)
    value = complex(float(parts[1]), float(parts[2])) if parts else parse_literals(text.strip())
    if expected.kind() != "ListType":
        return _scalar(value, expected.kind())
    if not isinstance(value, list):
        raise ValueError(f"the argument {name} is not a list: {text[:40]!r}")
    return [_scalar(item, expected.getElementType().kind()) for item in value]


def _scalar(value: Any, kind: str) -> Any:
    plain = kind.removesuffix("Type")
    if plain not in VALUE_OF_CODE:
        return float(value) if kind == "FloatType" and type(value) is int else value
    if type(value) is not int or value not in VALUE_OF_CODE[plain]:
        raise ValueError(f"this torch has no {plain} with the number {str(value)[:40]}")
    return VALUE_OF_CODE[plain][value]


DEFAULTS = (
    NO_VALUES,
    NO_GRADIENTS,
    "results and the memory of tensors: the file has none, so calls of a step run on generated arguments",
    "devices of tensors: the file has none, so they are on the device of the file's kernels, else on the processor",
    "dtypes of tensors in lists: the file has none, so they are taken from the call's other tensors, or float32",
    "modules: the file names them by class and number, and only if it was recorded with with_stack=True",
)
MOST_EVENTS = 10_000_000  # maximum number of events of a file; each takes 48 bytes of memory
EVENTS = "traceEvents"
MARKS = (b'"traceEvents"', b'"baseTimeNanoseconds"')


def recognizes(head: Head) -> bool:
    start = head.start.lstrip()
    if start.startswith(b"{"):
        # timelines written by opgrip lack torch's shapes; reading one reports that
        return any(mark in head.start for mark in MARKS) or (
            b'"schemaVersion"' in start and b'"deviceProperties"' in start
        )
    return start.startswith(b"[") and b'"ph"' in head.start and b'"cat"' in head.start


def read(file: ForeignFile) -> Iterator[Record]:
    cuts: list[str] = []
    table, facts = _events_of(file, cuts)
    if not table.operators:
        raise UserError(
            f"{file.path} contains no operators",
            "profile with activities=[ProfilerActivity.CPU, ...], record_shapes=True",
        )
    if not table.shapes:
        raise UserError(f"{file.path} contains no shapes of tensors", "profile with record_shapes=True")
    device = f"cuda:{table.devices.most_common(1)[0][0]}" if table.devices else "cpu"
    in_graphs = _calls_in_graphs(table, file)
    builder = RecordBuilder("chrome", file.losses, facts, is_timed=True)
    adder = _Adder(builder, device, file.losses)
    kernels: dict[int, OperatorKernels] = {}
    on_host = (
        (thread, call) for thread, events in table.threads() for call in calls_of(events, table.work, file.losses.skip)
    )
    for thread, call in chain(on_host, in_graphs):
        signature = adder.add(call, thread)
        if signature is not None and call.work.launches:
            kernels.setdefault(signature, OperatorKernels(Counter(), Counter())).add(call.work)
        yield from builder.ready()
    for signature, work in kernels.items():
        names = list(work.launches)
        launches, times = ([counts[name] for name in names] for counts in (work.launches, work.device_ns))
        yield Kernels(signature, names, launches, times)
    yield from builder.end()
    if cuts:
        raise Damage(cuts[-1])


def _calls_in_graphs(table: EventTable, file: ForeignFile) -> Iterable[tuple[str, ProfiledCall]]:
    durations = table.kernels["duration"]
    in_graphs = np.isin(table.kernels["correlation"], list(table.graph_launches))
    share = float(durations[in_graphs].sum() / max(durations.sum(), 1))
    if file.capture is None:
        file.losses.doubts += doubts_of(share)
        return ()
    captured, _ = _events_of(replace(file, path=file.capture), [])
    graphs = captured_graphs(captured, file.losses.skip)
    if not graphs:
        raise UserError(
            f"{file.capture} does not contain the capture of a CUDA graph",
            "profile the program while it captures its CUDA graphs",
        )
    calls = GraphLaunchCalls(table, graphs, file.losses.skip)
    file.losses.doubts += doubts_of(share * (1 - calls.matched))
    file.losses.defaults.append(
        f"graphs: {100 * calls.share:.0f} % of the device's time in graph launches is of operators in {file.capture}"
    )
    return calls


def _events_of(file: ForeignFile, cuts: list[str]) -> tuple[EventTable, dict[str, Any]]:
    table = EventTable()
    facts: dict[str, Any] = {}
    repair = Repair("ph", lambda reason, count: file.losses.skip("?", f"an event is not JSON: {reason}", count))
    try:
        # torch writes some arguments of kernels twice
        for name, form in members(file.chunks(cuts), EVENTS, file.unbounded, strict=False, repair=repair):
            if name != EVENTS:
                if name in ("host_name", "traceName") and isinstance(form, str):
                    facts[name] = form[:1000]
                continue
            try:
                table.add(form)
            except (ValueError, OverflowError, TypeError) as error:
                file.losses.skip("?", str(error)[:200])
            file.check(len(table), MOST_EVENTS, "it contains more than {:,} events")
    except TooLong:
        raise file.refusal("an event is longer than 16 MB, or is not JSON") from None
    except FormatError as error:
        reason = "it is cut" if isinstance(error, CutText) else f"it is not JSON ({error})"[:200]
        cuts.append(f"{reason} after event {table.read:,}")
    if not table.operators and (cuts or (file.losses.skipped and not table.read)):
        raise file.damage([*cuts, *(reason for _, reason in file.losses.skipped)][0])
    return table, {"profiled": facts} if facts else {}


class _Adder:
    def __init__(self, builder: RecordBuilder, device: str, losses: Losses) -> None:
        self._builder, self._losses = builder, losses
        self._bound = cache(lambda item: _bound(item, device))
        self._forward_scopes: dict[int, int] = {}

    def add(self, call: ProfiledCall, thread: str) -> int | None:
        event, scope, work = call.event, call.scope, call.work
        bound = self._bound(event.slice)
        if isinstance(bound, str):
            self._losses.skip(event.slice.name.replace("::", "."), bound)
            return None
        if call.forward >= 0:
            scope = replace(scope, forward=self._forward_scopes.get(call.forward))
        elif event.sequence >= 0:
            self._forward_scopes[event.sequence] = self._builder.add_scope(scope)
        return self._builder.add_call(
            bound.op,
            _with_copied_from(bound.args, work),
            bound.kwargs,
            scope=scope,
            thread=thread,
            start_ns=event.start_ns,
            duration_ns=event.end_ns - event.start_ns,
            device_ns=sum(work.device_ns.values()) if work.launches else -1,
        )


def _bound(item: Slice, device: str) -> Bound | str:
    if item.inputs is None:
        return "the file does not have its shapes"
    try:
        return bind_inputs(item.name, item.inputs, device)
    except NotConverted as error:
        return str(error)


def _with_copied_from(args: tuple[Any, ...], work: OperatorKernels) -> tuple[Any, ...]:
    indices = [index for index, value in enumerate(args) if isinstance(value, TensorSpec)]
    names = " ".join(work.launches)
    if "HtoD" in names and indices:
        there = indices[-1]
    elif "DtoH" in names and len(indices) > 1:
        there = indices[0]
    else:
        return args
    return tuple(replace(value, device="cpu") if index == there else value for index, value in enumerate(args))


def write(trace: Trace, file: IO[bytes], losses: Losses) -> None:
    file.writelines(line.encode() for line in timeline_lines(trace))
    for number, op in trace.calls["op"].items():
        losses.lose(int(number), str(op), "arguments except the shapes of tensors")  # type: ignore[call-overload]


MOSTLY = 0.5  # share of device time in graph launches from which on the other calls do not represent the program


def doubts_of(share: float) -> list[str]:
    if share < MOSTLY:
        return []
    return [
        f"{100 * share:.0f} % of the device's time is in graph launches, whose operators this file does not have: "
        "name the profile of their capture by --capture"
    ]


@dataclass(slots=True)
class CapturedGraph:
    """The calls that a program made while it captured a CUDA or HIP graph.

    launches : names of the launched kernels in order, empty names if the profile does not have them
    calls : each with the indices of its kernels in `launches`
    """

    launches: list[str] = field(default_factory=list)
    calls: list[tuple[ProfiledCall, list[int]]] = field(default_factory=list)

    def launches_these(self, kernels: Sequence[str]) -> bool:
        if not kernels or len(kernels) != len(self.launches):
            return False
        return not all(self.launches) or Counter(self.launches) == Counter(kernels)


def captured_graphs(table: EventTable, skip: Callable[[str, str], None]) -> list[CapturedGraph]:
    ends = [*sorted(table.capture_ends), 1 << 62]
    spans = [(begin, ends[bisect_right(ends, begin)]) for begin in sorted(table.capture_begins)]
    graphs, first_ns = [CapturedGraph() for _ in spans], table.first_ns

    def graph_at(time_ns: int) -> CapturedGraph | None:
        index = bisect_right(spans, (time_ns, 1 << 62)) - 1
        return graphs[index] if index >= 0 and time_ns < spans[index][1] else None

    def meets(event: ProfilerEvent) -> bool:
        index = bisect_right(spans, (event.end_ns + first_ns, 0)) - 1
        return index >= 0 and spans[index][1] > event.start_ns + first_ns

    work: dict[int, OperatorKernels] = {}
    names = table.kernel_names
    launches = (table.launches[name].tolist() for name in ("start", "external", "name"))
    for start_ns, external, name in sorted(zip(*launches, strict=True)):
        graph = graph_at(start_ns)
        if graph is not None:
            if external >= 0:
                own = work.setdefault(external, OperatorKernels(Counter(), Counter()))
                own.launches[str(len(graph.launches))] += 1
            graph.launches.append(names[name] if name >= 0 else "")
    for _, events in table.threads():
        inside = (event for event in events if meets(event))
        for call in calls_of(inside, work, skip):
            graph = graph_at(call.event.start_ns + first_ns)
            if graph is not None:
                graph.calls.append((call, sorted(map(int, call.work.launches))))
    for graph in graphs:
        graph.calls.sort(key=lambda item: item[0].event.start_ns)
    return graphs


class GraphLaunchCalls:
    """Finds the calls of each launched CUDA or HIP graph: those of a captured graph with the same kernels."""

    def __init__(self, table: EventTable, graphs: Sequence[CapturedGraph], skip: Callable[[str, str], None]) -> None:
        self._launches: list[tuple[int, str, CapturedGraph, Sequence[tuple[str, int]]]] = []
        joined_ns = matched_ns = device_ns = 0
        by_launch = _kernels_by_launch(table)
        turns: Counter[tuple[Slice, ...]] = Counter()
        for correlation, (start_ns, thread) in sorted(table.graph_launches.items(), key=lambda item: item[1][0]):
            kernels = by_launch.get(correlation, [])
            device_ns += sum(duration for _, duration in kernels)
            names = [name for name, _ in kernels]
            fitting = [graph for graph in graphs if graph.launches_these(names)]
            contents = {tuple(call.event.slice for call, _ in graph.calls) for graph in fitting}
            if len(contents) != 1:
                fit = f"{len(contents)} different captured" if contents else "none of the captured"
                skip("graph launch", f"its {len(names)} kernels match {fit} graphs")
                continue
            # layers of a model are often graphs of equal calls, and are launched in the order of their captures
            (content,) = contents
            graph = fitting[turns[content] % len(fitting)]
            turns[content] += 1
            ordered = [kernels[index] for index in _paired(graph.launches, names)]
            matched_ns += sum(duration for _, duration in kernels)
            joined_ns += sum(ordered[index][1] for _, launches in graph.calls for index in launches)
            self._launches.append((start_ns - table.first_ns, table.thread_name(thread), graph, ordered))
        self.share = joined_ns / max(device_ns, 1)
        """share of the device's time in launches that belongs to these calls"""
        self.matched = matched_ns / max(device_ns, 1)
        """share of the device's time in launches that is spent in launches of the captured graphs"""

    def __iter__(self) -> Iterator[tuple[str, ProfiledCall]]:
        for start_ns, thread, graph, kernels in self._launches:
            for index, (call, launches) in enumerate(graph.calls):
                work = OperatorKernels(Counter(), Counter())
                for name, duration in (kernels[number] for number in launches):
                    work.add(OperatorKernels(Counter({name: 1}), Counter({name: duration})))
                at = start_ns + index
                event = replace(call.event, start_ns=at, end_ns=at, external=-1, sequence=-1)
                yield f"graphs of {thread}", replace(call, event=event, forward=-1, work=work)


def _kernels_by_launch(table: EventTable) -> dict[int, list[tuple[str, int]]]:
    kernels: dict[int, list[tuple[str, int]]] = defaultdict(list)
    names = table.kernel_names
    order = np.argsort(table.kernels["start"], kind="stable")
    columns = (table.kernels[name][order].tolist() for name in ("correlation", "name", "duration"))
    for correlation, name, duration in zip(*columns, strict=True):
        if correlation in table.graph_launches:
            kernels[correlation].append((names[name], duration))
    return kernels


def _paired(captured: Sequence[str], launched: Sequence[str]) -> list[int]:
    if not all(captured):
        return list(range(len(captured)))
    order = [0] * len(captured)
    by_name = [sorted(range(len(names)), key=names.__getitem__) for names in (captured, launched)]
    for index, kernel in zip(*by_name, strict=True):
        order[index] = kernel
    return order


formats.register("chrome")(
    Format(
        "torch.profiler's traces with shapes, as export_chrome_trace writes them; written as a timeline",
        recognizes,
        read,
        write,
        defaults=DEFAULTS,
        has_graphs=True,
    )
)
