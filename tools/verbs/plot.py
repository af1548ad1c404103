"""`opgrip plot`: results as a picture."""

from __future__ import annotations

import argparse
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.tools.plots import Plot, Request, plots
from opgrip.tools.verbs.kept_runs import add_store
from opgrip.tools.verbs.verb import Verb, verbs
from opgrip.traces.command import add_debug
from opgrip.traces.errors import UserError
from opgrip.traces.words import counted

if TYPE_CHECKING:
    from opgrip.replay.measuring.results import Result
    from opgrip.replay.outcome import Results

EXAMPLES = """\
examples:
  opgrip plot modes.json --kind modes -o modes.pdf                   of opreplay --mode jit,compile
  opgrip plot modes.json --kind modes --by op -o operators.svg
  opgrip plot threads.json --kind scaling -o threads.pdf             of opreplay --threads 1,2,4
  opgrip plot modes.json --kind shapes --op 'aten.conv*' -o conv.pdf
  opgrip plot roofline.json --kind roofline -o roofline.pdf          of opreplay --roofline
  opgrip plot latest~2 latest~1 latest --kind history -o history.png
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    kinds = "; ".join(f"{name}: {plot.summary}" for name, plot in plots.items())
    parser.add_argument("results", nargs="+", metavar="RESULTS", help="files of opreplay, or runs of the store")
    add_store(parser)
    parser.add_argument("--kind", required=True, choices=plots.names(), help=kinds)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="a .png, .svg or .pdf")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    parser.add_argument("--op", metavar="GLOB", help="only cases of these operators, such as 'aten.conv*'")
    parser.add_argument("--case", metavar="KEY", help="only the case whose key in the results begins so")
    parser.add_argument("--by", metavar="WORD", help="what cases are grouped by: family, op (default: family)")
    parser.add_argument("--over", metavar="WORD", help="the x axis: threads, batch_scale, streams; bytes, flops")
    parser.add_argument("--title", metavar="TEXT", help="of the picture (default: trace, machine and torch)")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Draw, and write the picture."""
    from opgrip.replay.outcome import read_run
    from opgrip.replay.store.store import Store
    from opgrip.traces.figures import check_plottable, write_figure
    from opgrip.traces.output import check_writable, whole_file

    plot = plots.get(args.kind)
    assert plot is not None, "the parser has checked it"
    _check(plot, args)
    check_plottable(args.output)
    check_writable(args.output, args.force)
    store = Store(args.store)
    runs: dict[str, Results] = {}
    for name in args.results:
        path = store.find(name)
        results = read_run(path)
        rows = [row for row in results.rows if _is_selected(row, args)]
        runs[_unique(path.stem, runs)] = replace(results, rows=rows)
    if not any(results.rows for results in runs.values()):
        raise UserError("no row is selected", "choose another --op or --case")
    title = args.title if args.title is not None else _title(args.kind, runs)
    request = Request(runs, title, args.by or "family", args.over)
    with whole_file(args.output, args.force) as file:
        write_figure(lambda: plot.draw(request), args.output.suffix.removeprefix("."), file)
    return 0


def _check(plot: Plot, args: argparse.Namespace) -> None:
    """Raise `UserError` for what does not go together."""
    number = len(args.results)
    if number < plot.least:
        raise UserError(f"--kind {args.kind} draws several runs", f"name {plot.least} or more")
    if plot.most is not None and number > plot.most:
        raise UserError(f"--kind {args.kind} draws {counted(plot.most, 'run')}, not {number}", "draw one at a time")
    for flag, word, words in (("--by", args.by, plot.by), ("--over", args.over, plot.over)):
        if word is not None and word not in words:
            hint = f"choose {' or '.join(words)}" if words else "leave it out"
            raise UserError(f"--kind {args.kind} does not take {flag} {word}", hint)


def _is_selected(row: Result, args: argparse.Namespace) -> bool:
    return (args.op is None or fnmatchcase(row.op, args.op)) and (args.case is None or row.key.startswith(args.case))


def _title(kind: str, runs: dict[str, Results]) -> str:
    """Trace, machine and torch, each once; of a roofline the trace alone, since it names the machine itself."""
    headers = [run.header for run in runs.values()]
    traces = dict.fromkeys(str(header.get("trace", "")) for header in headers)
    if kind == "roofline":
        return ", ".join(filter(None, traces))
    machines = dict.fromkeys(_machine(header) for header in headers)
    versions = dict.fromkeys(f"torch {header['torch']}" for header in headers if "torch" in header)
    return "; ".join(filter(None, [", ".join(filter(None, part)) for part in (traces, machines, versions)]))


def _machine(header: dict[str, object]) -> str:
    environment = header.get("environment")
    processor = environment.get("processor") if isinstance(environment, dict) else None
    device = str(header.get("device", ""))
    return str(processor or device) if device.partition(":")[0] in ("", "cpu") else device


def _unique(name: str, taken: dict[str, Results]) -> str:
    number = 1
    while (unique := name if number == 1 else f"{name} ({number})") in taken:
        number += 1
    return unique


verbs.register("plot")(Verb("results as a picture for a paper: .png, .svg or .pdf", EXAMPLES, prepare, run))
