"""`opgrip trace info`: what is in a trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from opgrip.tools.verbs.verb import Verb, verbs
from opgrip.traces import Trace, load
from opgrip.traces.arguments import TensorSpec, leaves
from opgrip.traces.command import add_debug, add_reading, positive, printable
from opgrip.traces.names import tensor_outline
from opgrip.traces.records import FUNCTION, Dropped, Entered, Scope, Signature

EXAMPLES = """\
examples:
  opgrip trace info traces/faster_rcnn.jsonl
  opgrip trace info traces/faster_rcnn.jsonl --top 30 | less
  opgrip trace info traces/faster_rcnn.jsonl --by function --by line
"""
PIPE_WIDTH = 120
MOST_UNFINISHED = 20
"""Calls that were entered and not left which are shown: as many as calls stand inside of each other."""


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a file that opcapture wrote")
    parser.add_argument(
        "--top", type=positive, default=12, metavar="N", help="rows of each table (default: %(default)s)"
    )
    parser.add_argument(
        "--by",
        choices=tuple(GROUPS),
        action="append",
        help="one table of time by this; can be repeated (default: op and module)",
    )
    add_reading(parser, "show what there is of a cut or damaged trace")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print where the trace comes from, and its time by operator and module."""
    trace = load(args.trace, args.partial, args.unbounded)
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, width=PIPE_WIDTH, highlight=False)
    for name, value in _facts(trace):
        console.print(Text(f"{name:<12}{printable(value)}"), soft_wrap=True)
    for by in args.by or ("op", "module"):
        table = trace.summary(*GROUPS[by].columns)
        title = f"{GROUPS[by].title} by share of time ({len(table)} in all)"
        _print_table(console, title, list(_rows(table.head(args.top), by)))
    return 0


@dataclass(frozen=True, slots=True)
class Group:
    """What one table has a row of."""

    title: str
    columns: tuple[str, ...]


GROUPS = {
    "op": Group("operators", ("op",)),
    "module": Group("modules", ("module", "phase")),
    "function": Group("functions", ("function", "file", "phase")),
    "line": Group("lines", ("file", "line", "function", "phase")),
}
"""The tables by the name that the user gives them; calls of a backward pass count to what caused them."""


def _facts(trace: Trace) -> Iterable[tuple[str, str]]:
    header, calls = trace.header, trace.calls
    model = header.get("model")
    if isinstance(model, dict):
        yield "model", ", ".join(str(model[name]) for name in ("name", "class", "source") if name in model)
        yield "run", f"{model.get('run')}, {header.get('steps')} steps after {header.get('warmup')} to warm up"
    command = header.get("command")
    yield "command", " ".join(map(str, command)) if isinstance(command, list) else str(command)
    versions = (f"{name} {header[name]}" for name in ("opgrip", "torch", "python") if name in header)
    processes = header.get("processes")
    if isinstance(processes, list):
        yield "processes", str(len(processes))
    yield "made by", ", ".join(versions)
    devices = header.get("devices")
    if isinstance(devices, dict):
        yield "devices", "; ".join(f"{name}: {device}" for name, device in devices.items())
    yield "time", str(header.get("time"))
    functions = calls[calls["kind"] == FUNCTION]
    inside = len(calls) - len(functions) - len(trace.own_calls)
    inside_note = f", {inside:,} of them inside extension functions" if inside else ""
    yield "calls", f"{len(calls) - len(functions):,}{inside_note}"
    if len(functions):
        names = functions["op"].nunique()
        below = int(calls["gripped"].sum())
        yield "gripped", f"{len(functions):,} calls of {names} functions, {below:,} calls below them"
    operators = [item for item in trace.signatures if item.kind != FUNCTION]
    yield "signatures", f"{len(operators):,} of {len({item.op for item in operators})} operators"
    yield from _losses(trace)


def _losses(trace: Trace) -> Iterable[tuple[str, str]]:
    if trace.missing:
        yield "incomplete", trace.missing
    if trace.end is not None:
        yield "dropped", _list_dropped(trace.end.dropped)
        if trace.end.passed_by:
            yield "passed by", _list_dropped(trace.end.passed_by)
        if trace.end.stopped:
            yield "stopped", f"at {trace.end.stopped}, and the program went on"
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
    """A call that was entered and not left, with what it was called on."""
    where = f" at {scope.file}:{scope.line} in {scope.function}" if scope is not None and scope.function else ""
    if signature is None:
        return f"signature {entered.signature}{where}"
    return f"{signature.op}({', '.join(map(_outline, leaves([signature.args, signature.kwargs])))}){where}"


def _outline(leaf: object) -> str:
    return tensor_outline(leaf.dtype, leaf.shape) if isinstance(leaf, TensorSpec) else str(leaf)


def _list_dropped(dropped: list[Dropped]) -> str:
    return "; ".join(f"{item.count:,} {item.op}: {item.reason}" for item in dropped) or "nothing"


def _rows(table: pd.DataFrame, by: str) -> Iterator[tuple[str, ...]]:
    names = GROUPS[by].columns
    yield ("share", "time us", "calls", "signatures", *("operator" if name == "op" else name for name in names))
    for row in table.to_dict("records"):
        where = (printable(row[name]) or ("(root)" if name == "module" else "") for name in names)
        yield (f"{row['share']:.1%}", f"{row['time_us']:,.0f}", f"{row['calls']:,}", str(row["signatures"]), *where)


def _print_table(console: Console, title: str, rows: list[tuple[str, ...]]) -> None:
    names, *body = rows
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for place, name in enumerate(names):
        table.add_column(name, justify="right" if place < 4 else "left", overflow="fold")
    for row in body:
        table.add_row(*map(Text, row))
    console.print(table)


verbs.register("trace info")(Verb("show what a trace holds", EXAMPLES, prepare, run))
