"""`opgrip trace info`: what is in a trace."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from opgrip.tools.verbs.verb import Verb, verbs
from opgrip.traces.command import add_debug, positive, printable
from opgrip.traces.errors import UserError
from opgrip.traces.output import check_writable, whole_file
from opgrip.traces.progress import Reporter

if TYPE_CHECKING:
    import pandas as pd

    from opgrip.traces import Trace
    from opgrip.traces.records import Dropped, Entered

EXAMPLES = """\
examples:
  opgrip trace info trace:faster_rcnn
  opgrip trace info trace:faster_rcnn --top 30 | less
  opgrip trace info trace:faster_rcnn --by function --by line
"""
PIPE_WIDTH = 120


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
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write all rows of the tables: .json, .csv")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    parser.add_argument("--partial", action="store_true", help="show what there is of a cut or damaged trace")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print where the trace comes from, and its time by operator and module."""
    from opgrip.traces import load

    tables = args.by or ["op", "module"]
    if args.output is not None:
        _check_output(args.output, args.force, tables)
    with Reporter(args.prog).reading(args.trace):
        trace = load(args.trace, partial=args.partial)
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, width=PIPE_WIDTH, highlight=False)
    for name, value in _facts(trace):
        console.print(Text(f"{name:<12}{printable(value)}"), soft_wrap=True)
    summaries = {by: trace.summary(*GROUPS[by].columns) for by in tables}
    for by, table in summaries.items():
        title = f"{GROUPS[by].title} by share of time ({len(table)} in all)"
        _print_table(console, title, list(_rows(table.head(args.top), by)))
    if args.output is not None:
        _write(summaries, args.output, args.force)
    return 0


def _check_output(path: Path, force: bool, tables: Sequence[str]) -> None:
    if path.suffix not in (".json", ".csv"):
        raise UserError(f"{path} is neither .json nor .csv", "name one of these")
    if path.suffix == ".csv" and len(tables) > 1:
        raise UserError(f"{path} holds one table, and here are {' and '.join(tables)}", "name one with --by")
    check_writable(path, force)


def _write(summaries: Mapping[str, pd.DataFrame], path: Path, force: bool) -> None:
    """All rows of the tables: one object of tables in JSON, one table as CSV."""
    with whole_file(path, force) as file:
        if path.suffix == ".csv":
            (table,) = summaries.values()
            file.write(table.to_csv(index=False).encode())
        else:
            parts = (f"{json.dumps(by)}: {table.to_json(orient='records')}" for by, table in summaries.items())
            file.write(f"{{{', '.join(parts)}}}\n".encode())


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
    from opgrip.traces.records import FUNCTION

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
    for entered in trace.unfinished:
        yield "unfinished", _describe_entered(trace, entered)
    raised = [item for item in trace.signatures if item.raised is not None]
    if raised:
        yield "raised", "; ".join(f"{item.op}: {item.raised}" for item in raised)
    if trace.unknown:
        yield "passed over", ", ".join(f"{count} {name}" for name, count in trace.unknown.items())


def _describe_entered(trace: Trace, entered: Entered) -> str:
    """A call that was entered and not left, with what it was called on."""
    from opgrip.traces.arguments import leaves

    signature = entered.opened or next((item for item in trace.signatures if item.number == entered.signature), None)
    scope = next((item for item in trace.scopes if item.number == entered.scope), None)
    where = f" at {scope.file}:{scope.line} in {scope.function}" if scope is not None and scope.function else ""
    if signature is None:
        return f"signature {entered.signature}{where}"
    return f"{signature.op}({', '.join(map(_outline, leaves([signature.args, signature.kwargs])))}){where}"


def _outline(leaf: object) -> str:
    from opgrip.traces.arguments import TensorSpec
    from opgrip.traces.names import tensor_outline

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
