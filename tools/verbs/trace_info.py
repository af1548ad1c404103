"""`opgrip trace info`: what is in a trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from opgrip.tools.verbs.verb import Verb, verbs
from opgrip.traces import Trace, load
from opgrip.traces.command import add_debug, positive
from opgrip.traces.records import Dropped

EXAMPLES = """\
examples:
  opgrip trace info traces/faster_rcnn.jsonl
  opgrip trace info traces/faster_rcnn.jsonl --top 30 | less
"""
PIPE_WIDTH = 120


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a file that opcapture wrote")
    parser.add_argument(
        "--top", type=positive, default=12, metavar="N", help="rows of each table (default: %(default)s)"
    )
    parser.add_argument("--partial", action="store_true", help="show what there is of a cut or damaged trace")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print where the trace comes from, and its time by operator and module."""
    trace = load(args.trace, partial=args.partial)
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, width=PIPE_WIDTH, highlight=False)
    for name, value in _facts(trace):
        console.print(Text(f"{name:<12}{value}"), soft_wrap=True)
    summary = trace.summary()
    _print_table(console, f"operators by share of time ({len(summary)} in all)", _operator_rows(summary.head(args.top)))
    modules = by_module(trace)
    _print_table(console, f"modules by share of time ({len(modules)} in all)", _module_rows(modules.head(args.top)))
    return 0


def by_module(trace: Trace) -> pd.DataFrame:
    """One row a module path and phase, by falling share of time: module, phase, calls, time_us, share."""
    own = trace.calls[trace.calls["inside"].isna()]
    groups = own.groupby(["module", "phase"], observed=True)["duration_ns"]
    table = groups.agg(["size", "sum"]).reset_index()
    table["share"] = table["sum"] / max(int(table["sum"].sum()), 1)
    table["time_us"] = table["sum"] / 1e3
    table = table.rename(columns={"size": "calls"}).drop(columns="sum")
    return table.sort_values(["share", "calls"], ascending=False, ignore_index=True)


def _facts(trace: Trace) -> Iterable[tuple[str, str]]:
    header, calls = trace.header, trace.calls
    model = header.get("model")
    if isinstance(model, dict):
        yield "model", ", ".join(str(model[name]) for name in ("name", "class", "source") if name in model)
        yield "run", f"{model.get('run')}, {header.get('steps')} steps after {header.get('warmup')} to warm up"
    yield "command", " ".join(map(str, header.get("command", [])))
    versions = (f"{name} {header[name]}" for name in ("opgrip", "torch", "python") if name in header)
    yield "made by", ", ".join(versions)
    devices = header.get("devices")
    if isinstance(devices, dict):
        yield "devices", "; ".join(f"{name}: {device}" for name, device in devices.items())
    yield "time", str(header.get("time"))
    inside = int(calls["inside"].notna().sum())
    made_inside = f", {inside:,} of them inside extension functions" if inside else ""
    yield "calls", f"{len(calls):,}{made_inside}"
    yield "signatures", f"{len(trace.signatures):,} of {len({item.op for item in trace.signatures})} operators"
    yield from _losses(trace)


def _losses(trace: Trace) -> Iterable[tuple[str, str]]:
    if trace.missing:
        yield "incomplete", trace.missing
    if trace.end is not None:
        yield "dropped", _counted(trace.end.dropped)
        if trace.end.without_values:
            yield "no values", _counted(trace.end.without_values)
    raised = [item for item in trace.signatures if item.raised is not None]
    if raised:
        yield "raised", "; ".join(f"{item.op}: {item.raised}" for item in raised)
    if trace.unknown:
        yield "passed over", ", ".join(f"{count} {name}" for name, count in trace.unknown.items())


def _counted(dropped: list[Dropped]) -> str:
    return "; ".join(f"{item.count:,} {item.op}: {item.reason}" for item in dropped) or "nothing"


def _operator_rows(table: pd.DataFrame) -> list[tuple[str, ...]]:
    return [
        ("share", "time us", "calls", "signatures", "operator"),
        *(
            (f"{row.share:.1%}", f"{row.time_us:,.0f}", f"{row.calls:,}", str(row.signatures), str(row.op))
            for row in table.itertuples()
        ),
    ]


def _module_rows(table: pd.DataFrame) -> list[tuple[str, ...]]:
    return [
        ("share", "time us", "calls", "phase", "module"),
        *(
            (f"{row.share:.1%}", f"{row.time_us:,.0f}", f"{row.calls:,}", str(row.phase), str(row.module) or "(root)")
            for row in table.itertuples()
        ),
    ]


def _print_table(console: Console, title: str, rows: list[tuple[str, ...]]) -> None:
    names, *body = rows
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for place, name in enumerate(names):
        table.add_column(name, justify="right" if place < 3 else "left", overflow="fold")
    for row in body:
        table.add_row(*map(Text, row))
    console.print(table)


verbs.register("trace info")(Verb("show what a trace holds", EXAMPLES, prepare, run))
