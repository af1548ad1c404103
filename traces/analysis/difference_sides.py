"""One side of a comparison of traces: calls and times of one or more traces, which can be stored in a small file per
day, so that later comparisons do not need the traces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from opgrip.cli.output_files import write_json
from opgrip.errors import UserError, shortened
from opgrip.traces.codec.record_forms import key_of_case
from opgrip.traces.io.foreign_files import format_of
from opgrip.traces.schema.arguments import FormatError, GeneratorSpec, Opaque, TensorSpec, leaves, tensors
from opgrip.traces.schema.json_values import check_finite, elapsed_ns, integer, text
from opgrip.traces.schema.python_objects import children
from opgrip.traces.schema.records import Signature
from opgrip.traces.schema.tensor_specs import tensor_outline
from opgrip.traces.table.call_table import COUNT, quantiles
from opgrip.traces.table.profiler_labels import STEP_LABEL, own_calls
from opgrip.traces.table.step_starts import reported_starts
from opgrip.traces.table.trace import Trace, load
from opgrip.traces.values import ValueModel

# Units per which calls are counted: steps if all traces record them, else traces if each side has one, else calls.
STEP, TRACE, CALL = "step", "trace", "call"


@dataclass(slots=True)
class Cases:
    """All calls on one side of a comparison that have the same key, and so the same operator and arguments.

    time_ns : total time, computed with the median time of each signature
    models : tensor arguments of the first signature among these calls, each with its value model if it has one
    times_us : for each signature, median time of a call and number of calls
    call_of_profile : text of the call without the details that profiles lack
    """

    op: str = ""
    call: str = ""
    count: int = 0
    time_ns: float = 0.0
    models: list[tuple[TensorSpec, ValueModel | None]] = field(default_factory=list)
    times_us: list[tuple[float, int]] = field(default_factory=list)
    call_of_profile: str = ""

    @property
    def median_us(self) -> float | None:
        """Median time of a call of the most frequent signature."""
        return max(self.times_us, key=lambda item: item[1])[0] if self.times_us else None

    def include(self, other: Cases) -> None:
        """Add the calls and times of `other`, but not its value models."""
        self.count += other.count
        self.time_ns += other.time_ns
        self.times_us += other.times_us


@dataclass(slots=True)
class Side:
    """Calls and times of all traces on one side of a comparison; traces are added one by one.

    cases : calls with the same operator and arguments, by their key
    header : header of the first trace
    steps : number of steps in all traces; None if a trace does not record its steps
    """

    cases: dict[str, Cases] = field(default_factory=dict)
    header: Mapping[str, Any] = field(default_factory=dict)
    traces: int = 0
    calls: int = 0
    time_ns: float = 0.0
    steps: int | None = 0

    def add(self, trace: Trace) -> None:
        calls = trace.own_distinct_calls
        counts = calls.groupby("signature")[COUNT].sum()
        medians = quantiles(calls["time_ns"], calls["signature"], calls[COUNT])
        totals = counts * medians if medians.any() else counts.astype(float)
        contexts = _contexts(trace)
        for signature in trace.signatures:
            number = signature.number
            if number not in counts.index:
                continue
            cases = self.cases.setdefault(key_of_case(signature, contexts.get(number, {})), Cases())
            if not cases.count:
                cases.op, cases.call = signature.op, call_outline(signature)
                cases.call_of_profile = call_outline(_as_in_profile(signature))
                cases.models = list(_models(signature, trace.values))
            cases.count += int(counts[number])
            cases.time_ns += float(totals[number])
            cases.times_us.append((float(medians[number]) / 1e3, int(counts[number])))
        self.header = self.header or trace.header
        steps = _steps(trace)
        self.steps = self.steps + steps if self.steps is not None and steps else None
        self.traces += 1
        self.calls += int(counts.sum())
        self.time_ns += float(totals.sum())

    def include(self, other: Side) -> None:
        """Add the calls and times of another side to this one, but not its value models."""
        for key, cases in other.cases.items():
            self.cases.setdefault(key, Cases(cases.op, cases.call)).include(cases)
        if not self.traces:
            self.header = other.header
        self.steps = None if self.steps is None or other.steps is None else self.steps + other.steps
        self.traces += other.traces
        self.calls += other.calls
        self.time_ns += other.time_ns

    def by_call(self) -> Side:
        """Return this side without value models, with calls joined that differ only in details that profiles lack."""
        joined: dict[str, Cases] = {}
        for cases in self.cases.values():
            key = cases.call_of_profile or cases.call
            joined.setdefault(key, Cases(cases.op, cases.call)).include(cases)
        return replace(self, cases=joined)

    def units(self, unit: str) -> float:
        return max(1, {STEP: self.steps or 0, TRACE: self.traces, CALL: self.calls}[unit])


def unit_of(before: Side, after: Side) -> str:
    """Return the unit per which both sides count their calls: step if known, else trace, else call."""
    if before.steps and after.steps:
        return STEP
    return TRACE if before.traces == after.traces == 1 else CALL


def _steps(trace: Trace) -> int:
    steps = trace.header.get("steps")
    if type(steps) is int:
        return max(steps, 0)
    if "on_demand" not in trace.header:
        if trace.end is None or not trace.end.step_starts_ns:
            return 0
        last_ns = max(
            (int(own["start_ns"].max()) for calls, _ in trace.call_parts() if len(own := own_calls(calls))), default=-1
        )
        return len(reported_starts(trace.end, last_ns))
    return sum(1 for label in trace.labels.index if STEP_LABEL.fullmatch(str(label)))


def _as_in_profile(signature: Signature) -> Signature:
    # profiles have no devices, and record a number that the operator takes as a tensor as a tensor without dimensions
    takes_tensors = signature.op.rpartition(".")[2].startswith(("Tensor", "self"))
    args = tuple(
        Opaque("number")
        if (isinstance(value, int | float | complex) and takes_tensors) or getattr(value, "shape", None) == ()
        else value
        for value in signature.args
    )
    kwargs = {name: value for name, value in signature.kwargs.items() if name != "device"}
    return replace(signature, args=args, kwargs=kwargs)


def _contexts(trace: Trace) -> dict[int, Mapping[str, Any]]:
    context_of = {scope.number: scope.context for scope in trace.scopes}
    first = trace.own_distinct_calls.drop_duplicates("signature")
    pairs = zip(first["signature"].tolist(), first["scope"].tolist(), strict=True)
    return {signature: trace.contexts.get(context_of.get(scope) or 0, {}) for signature, scope in pairs}


def _models(signature: Signature, values: Mapping[int, ValueModel]) -> Iterator[tuple[TensorSpec, ValueModel | None]]:
    for spec in tensors([signature.args, signature.kwargs]):
        yield spec, None if spec.values is None else values.get(spec.values)


SUFFIX = ".shapes.json"
VERSION = 1
# maximum size in bytes of a day's file, enough for a hundred thousand signatures; reading takes twenty times this
# memory
MOST_BYTES = 32 << 20


def write_day(side: Side, path: Path) -> None:
    """Write one side's calls and times to a file, for later comparisons; an existing file is replaced."""
    form = {
        "opgrip_shapes": VERSION,
        "header": side.header,
        "traces": side.traces,
        "steps": side.steps,
        "signatures": [
            {
                "key": key,
                "op": cases.op,
                "call": cases.call,
                "calls": cases.count,
                "time_ns": round(cases.time_ns),
                "median_us": None if cases.median_us is None else round(cases.median_us, 3),
            }
            for key, cases in side.cases.items()
        ],
    }
    write_json(form, path, force=True, default=str)


def read_day(path: Path) -> Side:
    """Return the side that `write_day` wrote to a file; raise `UserError` for a damaged file or another format."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise FormatError(f"the file has more than {MOST_BYTES >> 20} MB")
        form = json.loads(path.read_bytes())
        if not isinstance(form, dict) or form.get("opgrip_shapes") != VERSION:
            raise FormatError(f'the file does not contain "opgrip_shapes": {VERSION}')
        check_finite(form)
        return _side(form)
    except OSError as error:
        raise UserError(f"{path} cannot be read", str(error.strerror or error).lower()) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} was not written by --new-only", str(error)[:200]) from error


def _side(form: Mapping[str, Any]) -> Side:
    side = Side(header=dict(form["header"]), traces=elapsed_ns(form["traces"]))
    side.steps = None if form["steps"] is None else integer(form["steps"])
    for item in form["signatures"]:
        cases = Cases(
            text(item["op"]), text(item["call"]), elapsed_ns(item["calls"]), float(elapsed_ns(item["time_ns"]))
        )
        if item["median_us"] is not None:
            cases.times_us = [(float(item["median_us"]), cases.count)]
        side.cases[text(item["key"])] = cases
        side.calls += cases.count
        side.time_ns += cases.time_ns
    return side


SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PATTERN = "*?["


def paths_of(side: Path) -> list[Path]:
    """Return the trace files of a side: a file, a folder of traces, or a pattern of file names."""
    # a folder can also be the trace of another tool
    if side.is_dir() and format_of(side) is None:
        paths = sorted(path for path in side.iterdir() if path.name.endswith(SUFFIXES))
        if not paths:
            raise UserError(f"{side} contains no traces", f"names of traces end in {', '.join(SUFFIXES)}")
        return paths
    if not side.exists() and any(letter in side.name for letter in PATTERN):
        paths = sorted(side.parent.glob(side.name))
        if not paths:
            raise UserError(f"no file matches {side}", "name a trace, a folder of traces, or a pattern of file names")
        return paths
    return [side]


def load_side(paths: list[Path], partial: bool, unbounded: bool) -> Side:
    """Return one side of a comparison; its files are read one after another."""
    side = Side()
    for path in paths:
        if path.name.endswith(SUFFIX):
            side.include(read_day(path))
        else:
            side.add(load(path, partial, unbounded))
    return side


MOST = 400  # maximum number of characters of a call's arguments
MOST_LEAVES = 60  # maximum number of arguments that an outline lists one by one


def outline(value: Any) -> str:
    """Return a short text of an argument or of nested arguments, such as `(float32[2,3], 1, [2, 2])`."""
    many = sum(1 for _ in islice(leaves(value), MOST_LEAVES + 1)) > MOST_LEAVES
    return shortened(_short(value) if not many else _first_leaves(value), MOST)


def _first_leaves(value: Any) -> str:
    return f"{', '.join(map(_short, islice(leaves(value), MOST_LEAVES)))}, ..."


def _short(value: Any) -> str:
    match value:
        case TensorSpec():
            return tensor_outline(value.dtype, value.shape)
        case Opaque(name):
            return f"<{name}>"
        case GeneratorSpec(device):
            return f"generator of {device}"
        case str():
            return repr(value)
        case list():
            return f"[{', '.join(map(_short, value))}]"
        case tuple():
            return f"({', '.join(map(_short, value))})"
        case dict():
            return f"{{{', '.join(f'{_short(key)}: {_short(item)}' for key, item in value.items())}}}"
    inner = children(value)
    return str(value) if inner is None else f"{type(value).__name__}({', '.join(map(_short, inner))})"


def call_outline(signature: Signature) -> str:
    """Return a short text of a call, such as `aten.mul.Tensor(float32[2,3], 2.5)`."""
    words = [f"{name}={outline(value)}" for name, value in signature.kwargs.items()]
    return f"{signature.op}({shortened(', '.join([*map(outline, signature.args), *words]), MOST)})"
