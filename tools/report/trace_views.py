"""What a page is told of a trace: its time by module, line and function, its timeline, and its long-tail functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from opgrip.replay.cases.call_sites import CallSite, count_call_sites
from opgrip.replay.operators.lookup import family_of
from opgrip.tools.report.launches import describe_launches
from opgrip.traces.analysis.graph import make_graph
from opgrip.traces.analysis.longtail import find_longtail
from opgrip.traces.analysis.timeline import frames_of, origins
from opgrip.traces.codec.record_forms import key_of_case
from opgrip.traces.schema.arguments import TensorSpec, tensors
from opgrip.traces.schema.records import Signature
from opgrip.traces.table.trace import Trace

MOST_CALLS = 20_000
"""That a timeline has: the longest, in their order."""
MOST_PLACES = 20
"""From which a case is called, that a page lists."""
BANDWIDTH = 20e9
"""Bytes a second of a memory, where the saving of fusing is only to be compared."""

Plain = dict[str, Any]
Called = tuple[Signature, str]


def describe_trace(name: str, trace: Trace) -> Plain:
    """All views of a trace."""
    called = list(_called(trace))
    return {
        "name": name,
        "stacks": _stacks(trace),
        "lines": _lines(trace),
        "timeline": _timeline(trace),
        "longtail": _longtail(trace),
        "launches": describe_launches(trace, {signature.number: key for signature, key in called}),
        "cases": dict(_cases(trace, called)),
    }


def _stacks(trace: Trace) -> list[tuple[list[str], float]]:
    """Time by stack of Python functions from the outside, and the operator at its end."""
    by_number = origins(trace)
    stacks: dict[tuple[str, ...], float] = defaultdict(float)
    calls = trace.own_calls
    sums = calls.groupby(["scope", "op"], observed=True)["time_ns"].sum().reset_index()
    for scope, op, time_ns in sums.itertuples(index=False, name=None):
        record = by_number.get(int(scope))
        frames = [] if record is None else [_frame(*frame) for frame in reversed(frames_of(record)) if frame[1]]
        stacks[(*frames, str(op))] += time_ns / 1e3
    return [(list(stack), time_us) for stack, time_us in stacks.items()]


def _frame(file: str, function: str) -> str:
    return f"{function} ({file.rsplit('/', 1)[-1]})"


def _lines(trace: Trace) -> list[tuple[str, int, str, float, int]]:
    """File, line, function, time in us and number of calls."""
    calls = trace.own_calls
    grouped = calls.dropna(subset=["file"]).groupby(["file", "line", "function"], observed=True)["time_ns"]
    sums = grouped.agg(["sum", "size"])
    return [
        (str(file), int(line), str(function), float(total) / 1e3, int(count))
        for (file, line, function), total, count in zip(sums.index, sums["sum"], sums["size"], strict=True)
    ]


def _timeline(trace: Trace) -> Plain:
    """Calls with where they begin and how long they take, and which of them are on the critical path."""
    graph = make_graph(trace)
    critical = set(graph.facts.critical_path)
    steps = sorted(graph.steps.values(), key=lambda step: -step.duration_ns)[:MOST_CALLS]
    steps.sort(key=lambda step: step.start_ns)
    threads = list(dict.fromkeys(step.thread for step in steps))
    return {
        "threads": threads,
        "left_out": len(graph.steps) - len(steps),
        "calls": [
            (
                round(step.start_ns / 1e3, 1),
                round(step.duration_ns / 1e3, 1),
                threads.index(step.thread),
                step.op,
                step.module,
                step.phase,
                int(step.number in critical),
            )
            for step in steps
        ],
        "critical_us": graph.facts.critical_ns / 1e3,
    }


def _longtail(trace: Trace) -> list[Plain]:
    if not trace.calls["function"].notna().any():
        return []
    from opgrip.capture.command.own_cost import own_cost

    found = find_longtail([trace], lambda _: BANDWIDTH, own_cost())
    return [
        {
            "function": f"{item.name} ({item.file})",
            "calls": item.calls,
            "operators": item.launches + item.backward_launches,
            "time_us": item.wall_ns / 1e3,
            "saving_us": item.saving_ns / 1e3,
        }
        for item in found.functions
    ]


def _called(trace: Trace) -> Iterator[Called]:
    """The signatures that were called, with the key of their case."""
    contexts = {scope.number: trace.contexts.get(scope.context or 0, {}) for scope in trace.scopes}
    places = trace.own_calls.groupby(["signature", "scope"]).size().reset_index()
    scopes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, scope, count in places.itertuples(index=False, name=None):
        scopes[int(number)].append((int(scope), int(count)))
    for signature in trace.signatures:
        called = sorted(scopes.get(signature.number, ()), key=lambda item: -item[1])
        if called:
            yield signature, key_of_case(signature, contexts.get(called[0][0], {}))


def _cases(trace: Trace, called: Sequence[Called]) -> Iterator[tuple[str, Plain]]:
    """By key of the case, its arguments, what is known of their values, and where it is called from."""
    calls = trace.own_distinct_calls
    sites_by_signature = count_call_sites(calls, calls["signature"])
    for signature, key in called:
        places = sites_by_signature[signature.number]
        yield (
            key,
            {
                "family": family_of(signature.op),
                "arguments": list(_arguments(signature, trace)),
                "places": [(_place(site), site.count) for site in places[:MOST_PLACES]],
                "more_places": max(0, len(places) - MOST_PLACES),
            },
        )


def _arguments(signature: Signature, trace: Trace) -> Iterator[tuple[str, str]]:
    """Each argument, and of tensors what is known of their values."""
    from opgrip.replay.results.results import describe_shapes

    yield "all", describe_shapes(signature)
    for place, spec in enumerate(tensors([signature.args, signature.kwargs])):
        model = None if spec.values is None else trace.values.get(spec.values)
        known = "" if model is None else f": {_short(repr(model))}"
        layout = "" if _is_contiguous(spec) else f", strides {list(spec.stride or ())}"
        yield f"tensor {place}", f"{spec.dtype} {list(spec.shape)} on {spec.device}{layout}{known}"


def _is_contiguous(spec: TensorSpec) -> bool:
    expected = 1
    for size, stride in reversed(list(zip(spec.shape, spec.stride or (), strict=False))):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def _place(site: CallSite) -> str:
    where = site.line or "outside of the program's code"
    return f"{where}, in {site.module or 'no module'}, {site.phase}"
