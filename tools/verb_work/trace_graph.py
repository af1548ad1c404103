"""`opgrip trace graph`, `timeline`, `merge` and `ranks`: dataflow, calls over time, and traces of several processes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from tempfile import TemporaryFile

import pandas as pd

from opgrip.cli.command import DEVICE_TIME, counted, printable
from opgrip.cli.output_files import check_output, compress_to, whole_file, write_json, write_text
from opgrip.cli.progress import Reporter
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
from opgrip.tools.verbs import report_output
from opgrip.traces import load
from opgrip.traces.analysis.dataflow import Dataflow, DataflowStep, GraphFacts, Storage, graph_facts
from opgrip.traces.analysis.merge import merge
from opgrip.traces.analysis.ranks.waits import find_waits
from opgrip.traces.analysis.timeline import timeline_lines
from opgrip.traces.table.call_table import COUNT
from opgrip.traces.table.profiler_labels import operator_calls


def run_graph(args: argparse.Namespace) -> int:
    check_output(args.output, args.force, (".json",))
    with Reporter(args.prog).reading(args.trace):
        trace = load(args.trace, args.partial, args.unbounded)
        flow = Dataflow(trace)
        facts = graph_facts(flow)
    if not facts.calls or not flow.has_memory:
        raise UserError(f"{args.trace} contains no dataflow", "capture it again with this version")
    if args.output is not None:
        with whole_file(args.output, args.force) as file:
            file.writelines(f"{line}\n".encode() for line in as_json(flow, facts))
        report_output(args, counted(facts.calls, "call"))
    for line in _lines(facts):
        print(line, file=sys.stdout)
    return 0


def as_json(flow: Dataflow, facts: GraphFacts) -> Iterator[str]:
    """Yield the lines of a JSON object with the dataflow graph; each call and each storage is on one line."""
    path = ", ".join(map(str, facts.critical_path))
    memory = {"peak_bytes": facts.peak_bytes, "peak_at": facts.peak_at, "outside_bytes": facts.outside_bytes}
    yield f'{{"critical_path": {{"time_ns": {facts.critical_ns}, "duration_ns": {facts.critical_host_ns},'
    yield f'"calls": [{path}]}},'
    yield f'"live_memory": {json.dumps(memory)},'
    # the storages follow the calls, and another pass over the calls would cost more than the file
    with TemporaryFile("w+") as storages:

        def calls() -> Iterator[str]:
            for step, new in flow:
                storages.writelines(f"{_as_line(storage)}\n" for storage in new)
                yield _as_line(step)

        yield '"calls": ['
        yield from _separated(calls())
        yield "],"
        yield '"storages": ['
        storages.seek(0)
        yield from _separated(line.rstrip("\n") for line in storages)
        yield "]}"


def _as_line(item: DataflowStep | Storage) -> str:
    # `asdict` copies each list, which takes a third of the time of writing a graph
    return json.dumps({name: getattr(item, name) for name in item.__slots__})


def _separated(items: Iterable[str]) -> Iterator[str]:
    before = ""
    for item in items:
        if before:
            yield f"{before},"
        before = item
    if before:
        yield before


def _lines(facts: GraphFacts) -> Iterator[str]:
    dependencies = counted(facts.dependencies, "dependency", "dependencies")
    yield f"calls          {facts.calls:,}, {dependencies}, {counted(facts.storages, 'storage')}"
    path = f"{counted(len(facts.critical_path), 'call')}, {_part(facts.critical_ns, facts.time_ns)}"
    yield f"critical path  {path if facts.time_ns else 'unknown, because the trace has no times'}"
    if facts.has_device:
        yield f"               {DEVICE_TIME}; on the host, {_part(facts.critical_host_ns, facts.host_ns)}"
    at = "" if facts.peak_at is None else f" at call {facts.peak_at} ({printable(facts.peak_op)})"
    peak, outside = facts.peak_bytes / 1e6, facts.outside_bytes / 1e6
    yield f"live memory    {peak:,.2f} MB at most{at}, and {outside:,.2f} MB from before the first call"


def _part(part_ns: int, total_ns: int) -> str:
    return f"{part_ns / 1e6:,.2f} ms of {total_ns / 1e6:,.2f} ms ({part_ns / max(total_ns, 1):.0%})"


def run_timeline(args: argparse.Namespace) -> int:
    check_output(args.output, args.force, (".json", ".json.gz"))
    with Reporter(args.prog).reading(args.trace):
        trace = load(args.trace, args.partial, args.unbounded)
    if trace.header.get("timed") is False:
        raise UserError(f"{args.trace} has no times", "capture the program, or profile it with torch.profiler")
    if args.output is None:
        sys.stdout.writelines(timeline_lines(trace))
        return 0
    with whole_file(args.output, args.force) as file:
        sink = compress_to(file, args.output.name)
        for line in timeline_lines(trace):
            sink.write(line.encode())
        sink.close()
    calls = counted(int(operator_calls(trace.distinct_calls)[COUNT].sum()), "call")
    print(f"{args.prog}: wrote {calls} to {args.output}: open it in ui.perfetto.dev", file=sys.stderr)
    return 0


def run_merge(args: argparse.Namespace) -> int:
    calls, signatures = merge(args.traces, args.output, args.force, args.partial, args.unbounded)
    origin = f"{len(args.traces)} traces" if len(args.traces) > 1 else "one trace"
    print(
        f"{args.prog}: wrote {calls:,} calls of {signatures:,} signatures from {origin}, to {args.output}",
        file=sys.stderr,
    )
    return 0


def run_ranks(args: argparse.Namespace) -> int:
    check_output(args.output, args.force, (".json", ".csv"))
    with Reporter(args.prog).reading(args.trace):
        waits = find_waits(args.trace, args.partial, args.unbounded)
    if args.output is not None:
        if args.output.suffix == ".csv":
            write_text(waits.ranks.to_csv(index=False), args.output, args.force)
        else:
            write_json(waits.as_json(), args.output, args.force)
        report_output(args, counted(len(waits.ranks), "rank"))
    if args.json:
        print(json.dumps(waits.as_json(), indent=1))
        return 0
    _print_table(RANKS, waits.ranks, f"ranks ({len(waits.ranks)} in total)")
    pairs, places = waits.pairs.head(args.top), waits.places.head(args.top)
    _print_table(PAIRS, pairs, f"waiting times between ranks ({len(waits.pairs)} in total)")
    _print_table(PLACES, places, f"collectives by waiting time ({len(waits.places)} in total)")
    if unknown := int(waits.ranks["unknown"].sum()):
        print_line(
            f"calls of collectives whose end is unknown, because their results were not awaited: {unknown:,}",
            sys.stdout,
        )
    if waits.unmatched:
        print_line(f"calls of collectives that the traces of other ranks lack: {waits.unmatched:,}", sys.stdout)
    return 0


def _print_table(columns: Sequence[TableColumn], table: pd.DataFrame, title: str) -> None:
    print_table(columns, list(table.itertuples()), sys.stdout, title)


RANKS = (
    TableColumn("rank", "rank", ",d"),
    TableColumn("calls", "calls", ",d", rank=6),
    TableColumn("span ms", "span_ms", ",.2f"),
    TableColumn("compute ms", "compute_ms", ",.2f"),
    TableColumn("collectives", "collectives", ",d", rank=5),
    TableColumn("collective ms", "collective_ms", ",.2f"),
    TableColumn("waiting ms", "waiting_ms", ",.2f"),
    TableColumn("share", "share", ".1%"),
    TableColumn("came last", "last", ",d", rank=4),
    TableColumn("waited for ms", "caused_ms", ",.2f", rank=3),
)


PAIRS = (
    TableColumn("rank", "rank", ",d"),
    TableColumn("waits for", "waits_for", ",d"),
    TableColumn("collectives", "collectives", ",d"),
    TableColumn("waiting ms", "waiting_ms", ",.2f"),
)


PLACES = (
    TableColumn("waiting ms", "waiting_ms", ",.2f"),
    TableColumn("longest ms", "longest_ms", ",.2f", rank=5),
    TableColumn("collectives", "collectives", ",d"),
    TableColumn("mostly for rank", "slowest", ",d"),
    TableColumn("collective", "kind"),
    TableColumn("group", "group", rank=6),
    TableColumn("bytes", "size_bytes", ",d", rank=4),
    TableColumn("place", lambda row: f"{row.function} {row.file}:{row.line}".strip() if row.file else "", rank=3),
)
