"""`opgrip trace info`: prints facts about a trace, and tables of its calls."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import pandas as pd

from opgrip.cli.command import DEVICE_TIME, counted, printable
from opgrip.cli.option_types import Cut
from opgrip.cli.options import from_arguments
from opgrip.cli.output_files import check_output, csv_text, write_text
from opgrip.cli.progress import Reporter
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
from opgrip.replay.results.results import describe_shapes
from opgrip.tools.verbs import report_output
from opgrip.tools.verbs.trace_options import GROUPS, KERNEL, SIGNATURE, TABLES
from opgrip.traces import Trace, load
from opgrip.traces.analysis.redaction.redaction import REDACTED
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.schema.arguments import TensorSpec, leaves
from opgrip.traces.schema.records import FUNCTION, HIGHER_ORDER, Dropped, Entered, Scope, Signature
from opgrip.traces.schema.tensor_specs import tensor_outline
from opgrip.traces.table.accelerators import facts_in_words, time_doubts
from opgrip.traces.table.call_table import COUNT
from opgrip.traces.table.profiler_labels import is_operator, operator_calls
from opgrip.traces.zoo.manifest import FIELD, chosen_numbers

LABELS = 8  # maximum number of `record_function` labels that are shown
MOST_UNFINISHED = 20  # maximum number of unfinished calls that are shown; they can be nested deeply


def run(args: argparse.Namespace) -> int:
    tables = args.by or ["op", "module"]
    if args.output is not None and args.output.suffix == ".csv" and len(tables) > 1:
        raise UserError(f"{args.output} can contain only one table, got {' and '.join(tables)}", "choose one with --by")
    check_output(args.output, args.force, (".json", ".csv"))
    with Reporter(args.prog).reading(args.trace):
        reader = TraceReader(args.trace, args.unbounded, None, from_arguments(Cut, args), args.capture)
        trace = load(args.trace, args.partial, args.unbounded, reader)
    if KERNEL in tables and not trace.kernels:
        raise UserError(f"{args.trace} contains no kernels", "capture it on a GPU with --device-time kernels")
    if KERNEL in tables and (args.label or args.phase):
        raise UserError("kernels are recorded by signature, not by call", "leave out --label and --phase")
    part = trace.filter(label=args.label, phase=args.phase) if args.label or args.phase else trace
    if trace.call_count and not part.call_count:
        raise UserError("no call matches --label and --phase", "see opgrip trace info --by label --by phase")
    summaries = {by: _summary(part, by) for by in tables}
    if args.json:
        print(f'{{"facts": {json.dumps(list(facts(trace)))}, {_as_json(summaries).removeprefix("{")}')
    else:
        _print(trace, summaries, args.top)
    if args.output is not None:
        _write(summaries, args.output, args.force)
        report_output(args, counted(sum(map(len, summaries.values())), "row"))
    return 0


def _summary(trace: Trace, by: str) -> pd.DataFrame:
    if by == KERNEL:
        return trace.kernels_by_operator()
    table = trace.summary(("op", "signature") if by == SIGNATURE else GROUPS[by].columns)
    if by == SIGNATURE:
        shapes = {item.number: describe_shapes(item) for item in trace.signatures}
        table = table.assign(shapes=table["signature"].map(shapes)).drop(columns=["signature", "signatures"])
    # without times, as in some files of other tools, shares are by number of calls
    return table.drop(columns=list(TIMES), errors="ignore") if trace.header.get("timed") is False else table


def _print(trace: Trace, summaries: Mapping[str, pd.DataFrame], top: int) -> None:
    for name, value in facts(trace):
        print_line(f"{name:<12}{printable(value)}", sys.stdout, indent=12)
    print()
    if trace.distinct_calls["device_ns"].notna().any():
        print_line(f"{DEVICE_TIME}; the column host us has their times on the host", sys.stdout)
    is_timed = trace.header.get("timed") is not False
    for by, table in summaries.items():
        title = f"{TABLES[by].title} by share of {'time' if is_timed else 'calls'} ({len(table)} in total)"
        columns = [column for name, column in NUMBERS.items() if name in table]
        columns += [_place_column(name) for name in TABLES[by].columns]
        print_table(columns, list(table.head(top).itertuples()), sys.stdout, title)


def _write(summaries: Mapping[str, pd.DataFrame], path: Path, force: bool) -> None:
    if path.suffix == ".csv":
        ((by, table),) = summaries.items()
        table = _without_surrogates(table, by)
        write_text(csv_text(table.columns, table.itertuples(index=False)), path, force)
    else:
        write_text(f"{_as_json(summaries)}\n", path, force)


def _as_json(summaries: Mapping[str, pd.DataFrame]) -> str:
    tables = {by: _without_surrogates(table, by).to_json(orient="records") for by, table in summaries.items()}
    return f"{{{', '.join(f'{json.dumps(by)}: {table}' for by, table in tables.items())}}}"


def _without_surrogates(table: pd.DataFrame, by: str) -> pd.DataFrame:
    names = [name for name in TABLES[by].columns if name not in NUMBERED]
    return table.assign(
        **{
            name: [
                cell.encode(errors="backslashreplace").decode() if isinstance(cell, str) else cell
                for cell in table[name]
            ]
            for name in names
        }
    )


NUMBERED = ("line", "stream")  # columns that identify a row and are numbers


# columns of numbers; a table has some of them
NUMBERS = {
    "share": TableColumn("share", "share", ".1%"),
    "time_us": TableColumn("median x calls us", "time_us", ",.0f"),
    "total_us": TableColumn("measured us", "total_us", ",.0f", rank=3),
    "host_us": TableColumn("host us", "host_us", ",.0f", rank=1),
    "calls": TableColumn("calls", "calls", ",.0f", rank=1),
    "signatures": TableColumn("signatures", "signatures", ",.0f", rank=2),
    "launches": TableColumn("launches", "launches", ",.0f", rank=1),
}


TIMES = ("time_us", "total_us", "host_us")


# smallest width in characters of the printed columns with names, by column
LEAST = {
    "op": 20,
    "module": 20,
    "function": 16,
    "device": 0,
    "stream": 0,
    "file": 16,
    "line": 0,
    "phase": 8,
    "label": 16,
    "shapes": 16,
    KERNEL: 24,
}


def facts(trace: Trace) -> Iterable[tuple[str, str]]:
    header, calls = trace.header, trace.distinct_calls
    yield from (("doubtful", text) for text in trace.doubts)
    model = header.get("model")
    if isinstance(model, dict):
        yield "model", ", ".join(str(model[name]) for name in ("name", "class", "source") if name in model)
        yield "run", _run(model.get("run"), header.get("steps"), header.get("warmup"))
    if "converted_from" in header:
        yield "converted", f"from a file of {header['converted_from']}"
        yield from (("default", str(text)) for text in header.get("defaults", ()))
    if isinstance(redacted := header.get(REDACTED), dict):
        yield "redacted", _redacted(redacted)
    command = header.get("command")
    if command is not None:
        yield "command", " ".join(map(str, command)) if isinstance(command, list) else str(command)
    versions = (f"{name} {header[name]}" for name in ("opgrip", "torch", "python") if name in header)
    processes = header.get("processes")
    if isinstance(processes, list):
        yield "processes", str(len(processes))
    if made_by := ", ".join(versions):
        yield "made by", made_by
    devices = header.get("devices")
    if isinstance(devices, dict):
        yield "devices", "; ".join(f"{name}: {device}" for name, device in devices.items())
    yield from facts_in_words(header.get("accelerator"))
    if "time" in header:
        yield "time", str(header["time"])
    flight = header.get("flight")
    if isinstance(flight, dict) and _is_count(flight.get("last")):
        written = f", written for {flight['reason']}" if "reason" in flight else ", recovered after a crash"
        yield "flight", f"the last {counted(flight['last'], 'call')}{written}"
        if _is_count(flight.get("before")):
            yield "forgotten", f"{counted(flight['before'], 'call')}, not in the trace"
    yield from _distilled(header)
    yield from _counts(trace)
    operations = operator_calls(calls)
    operators = [item for item in trace.signatures if is_operator(item.op, item.kind)]
    yield from _graphs(trace)
    yield "signatures", f"{len(operators):,} of {counted(len({item.op for item in operators}), 'operator')}"
    contended = 0.0 if trace.end is None else trace.end.contended
    if operations["perturbed"].any():
        yield "perturbed", _perturbed(operations, contended)
    if len(labels := trace.labels):
        more = f" and {len(labels) - LABELS} more" if len(labels) > LABELS else ""
        yield "labels", ", ".join(f"{label} ({count:,})" for label, count in labels.head(LABELS).items()) + more
    yield from _losses(trace)
    slow_ns, duration_ns = ((operations[name] * operations[COUNT]).sum() for name in ("slow_memory_ns", "duration_ns"))
    yield from (("doubtful", text) for text in time_doubts(contended, slow_ns / max(duration_ns, 1)))
    if trace.device_time_doubt is not None:
        yield "doubtful", trace.device_time_doubt


def _counts(trace: Trace) -> Iterable[tuple[str, str]]:
    calls = trace.distinct_calls
    functions = calls[calls["kind"] == FUNCTION]
    are_higher_order = functions["op"].astype(str).str.startswith(HIGHER_ORDER)
    functions, higher_order = functions[~are_higher_order], functions[are_higher_order]
    inside_higher_order = calls["inside"].astype(str).str.startswith(HIGHER_ORDER)
    operations = operator_calls(calls)
    whole = int(operations[COUNT].sum())
    inside = whole - int(trace.own_distinct_calls[COUNT].sum())
    inside_note = f", {inside:,} of them inside extension functions" if inside else ""
    yield "calls", f"{whole:,}{inside_note}"
    if len(functions):
        names = functions["op"].nunique()
        below = int(calls[COUNT][calls["gripped"] & ~inside_higher_order].sum())
        calls_of = f"{counted(int(functions[COUNT].sum()), 'call')} of {counted(names, 'function')}"
        yield "gripped", f"{calls_of}, {counted(below, 'call')} below them"
    if len(higher_order):
        taking = ", ".join(sorted(name.removeprefix(HIGHER_ORDER) for name in {*higher_order["op"].astype(str)}))
        below = int(calls[COUNT][inside_higher_order].sum())
        yield (
            "nested",
            f"{counted(int(higher_order[COUNT].sum()), 'call')} of {taking}, {counted(below, 'call')} inside them",
        )


def _graphs(trace: Trace) -> Iterable[tuple[str, str]]:
    graphs = trace.graphs[trace.graphs["captured"]]
    if len(graphs):
        launches, calls = int(graphs["launches"].sum()), int((graphs["launches"] * graphs["calls"]).sum())
        what = f"{counted(launches, 'launch', 'launches')} of {counted(len(graphs), 'graph')}"
        yield "graphs", f"{what} ran {counted(calls, 'call')}, {graphs['share'].sum():.0%} of the device's time"
        for split, own in graphs[graphs["device_us"] > 0].groupby("split"):
            yield "graphs", f"{own['share'].sum():.0%} of the device's time is divided among their calls {split}"


def _distilled(header: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    cases = chosen_numbers(header)
    if cases is not None:
        traces, base = header[FIELD].get("traces"), header[FIELD].get("base")
        standing = f" that represent {counted(len(traces), 'trace')}" if isinstance(traces, dict) else ""
        against = f", by the times of {base}" if base else ""
        yield "distilled", f"{counted(len(cases), 'case')}{standing}{against}; other calls provide their context"


def _redacted(form: Mapping[str, Any]) -> str:
    exceptions = form.get("kept")
    names = f", except {', '.join(map(str, exceptions))}" if isinstance(exceptions, list) and exceptions else ""
    hidden = "; custom operators are renamed and cannot be replayed" if form.get("operators_hidden") else ""
    return f"names, paths, texts and values were replaced{names}{hidden}"


def _perturbed(calls: pd.DataFrame, contended: float) -> str:
    perturbed = calls[calls["perturbed"]]
    others = perturbed["signature"].isin(calls["signature"][~calls["perturbed"]])
    timed = int(perturbed[COUNT][others].sum())
    of_others = ", with times of similar calls" if others.all() else f", {timed:,} with times of similar calls"
    count = counted(int(perturbed[COUNT].sum()), "call")
    causes = ["right after the capture's own work"]
    causes += ["on slow memory"] if calls["slow_memory_ns"].any() else []
    causes += ["while other processes used the processors"] if contended else []
    return f"{count} {' or '.join(causes)}{of_others if others.any() else ''}"


def _run(name: object, steps: object, warmup: object) -> str:
    if not _is_count(steps):
        return str(name)
    return f"{name}, {counted(steps, 'step')}{f' after {warmup:,} to warm up' if _is_count(warmup) else ''}"


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 63


def _losses(trace: Trace) -> Iterable[tuple[str, str]]:
    if trace.missing:
        yield "incomplete", trace.missing
    if trace.end is not None:
        if trace.end.step_starts_ns:
            yield "steps", f"{len(trace.end.step_starts_ns):,}, for opgrip trace trim --steps"
        yield "dropped", _list_dropped(trace.end.dropped)
        if trace.end.passed_by:
            yield "passed by", _list_dropped(trace.end.passed_by)
        if trace.end.without_work:
            yield "no work", _count_by_reason(trace.end.without_work)
        if trace.end.stopped:
            yield "stopped", f"at {trace.end.stopped}, the program continued"
        if trace.end.thinned:
            left_out = [f"{what} {counted(count, 'time')}" for what, count in trace.end.thinned.items()]
            yield "left out", f"{', '.join(left_out)}, due to --max-overhead"
        if trace.end.without_values:
            yield "no values", _list_dropped(trace.end.without_values)
    signatures = {item.number: item for item in trace.signatures}
    scopes = {item.number: item for item in trace.scopes}
    for entered in trace.unfinished[:MOST_UNFINISHED]:
        signature = entered.opened or signatures.get(entered.signature)
        yield "unfinished", _describe_entered(entered, signature, scopes.get(entered.scope))
    if len(trace.unfinished) > MOST_UNFINISHED:
        yield "unfinished", f"{len(trace.unfinished) - MOST_UNFINISHED:,} others"
    raised = [item for item in trace.signatures if item.raised is not None]
    if raised:
        yield "raised", "; ".join(f"{item.op}: {item.raised}" for item in raised)
    if trace.unknown:
        yield "passed over", ", ".join(f"{count} {name}" for name, count in trace.unknown.items())


def _describe_entered(entered: Entered, signature: Signature | None, scope: Scope | None) -> str:
    where = f" at {scope.file}:{scope.line} in {scope.function}" if scope is not None and scope.function else ""
    if signature is None:
        return f"signature {entered.signature}{where}"
    return f"{signature.op}({', '.join(map(_outline, leaves([signature.args, signature.kwargs])))}){where}"


def _outline(leaf: object) -> str:
    return tensor_outline(leaf.dtype, leaf.shape) if isinstance(leaf, TensorSpec) else str(leaf)


def _list_dropped(dropped: list[Dropped]) -> str:
    # 0 stands for an unknown number
    return "; ".join(f"{item.count:,} {item.op}: {item.reason}".removeprefix("0 ") for item in dropped) or "nothing"


def _count_by_reason(items: list[Dropped]) -> str:
    counts: Counter[str] = Counter()
    for item in items:
        counts[item.reason] += item.count
    return ", ".join(f"{counted(count, 'call')} {reason}" for reason, count in counts.most_common())


def _place_column(name: str) -> TableColumn:
    empty = {"module": "(root)", "function": "(none)", "label": "(none)"}.get(name, "")

    def text(row: Any) -> str:
        import pandas as pd

        cell = getattr(row, name)
        return "" if pd.isna(cell) else str(cell) or empty

    return TableColumn("operator" if name == "op" else name, text, ">" if name in NUMBERED else "", least=LEAST[name])
