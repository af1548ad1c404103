"""`opgrip plot`: results as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from opgrip.cli.command import add_debug
from opgrip.replay.plots import PlottedRun, plots
from opgrip.tools.verbs.results_list import add_store
from opgrip.tools.verbs.verb import Verb, verbs

EXAMPLES = """\
examples:
  opgrip plot modes.json --kind modes -o modes.pdf                   of opreplay --mode jit,compile
  opgrip plot modes.json --kind modes --by op -o operators.svg
  opgrip plot modes.json --kind operators -o time.svg
  opgrip plot threads.json --kind scaling -o threads.pdf             of opreplay --threads 1,2,4
  opgrip plot modes.json --kind shapes --op 'aten.conv*' -o conv.pdf
  opgrip plot roofline.json --kind roofline -o roofline.pdf          of opreplay --roofline
  opgrip plot latest~2 latest~1 latest --kind history -o history.png
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    kinds = "; ".join(f"{name}: {plot.summary}" for name, plot in plots.items())
    parser.add_argument("results", nargs="+", metavar="RESULTS", help="files of opreplay, or runs of the store")
    add_store(parser)
    parser.add_argument("--kind", required=True, choices=plots.names(), help=kinds)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="a .png, .svg or .pdf")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    parser.add_argument("--op", metavar="GLOB", help="only cases of these operators, such as 'aten.conv*'")
    parser.add_argument("--case", metavar="KEY", help="only the case whose key in the results starts with this")
    parser.add_argument("--by", metavar="WORD", help="what cases are grouped by: family, op, module")
    parser.add_argument("--over", metavar="WORD", help="the x axis: threads, batch_scale, streams; bytes, flops")
    parser.add_argument("--title", metavar="TEXT", help="title of the plot (default: trace, machine and torch)")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Draw the plot, and write it to a file."""
    from opgrip.cli.output_files import check_writable, whole_file
    from opgrip.display.figures import check_plottable, write_figure
    from opgrip.replay.comparison.results_store import Store
    from opgrip.replay.outcome import read_run
    from opgrip.replay.plots.plot import PlotChoices, check_choices, draw_runs, request_for

    choices = PlotChoices(args.op, args.case, args.by, args.over, args.title)
    check_choices(args.kind, len(args.results), choices)
    check_plottable(args.output)
    check_writable(args.output, args.force)
    store = Store(args.store)
    runs: dict[str, PlottedRun] = {}
    for name in args.results:
        path = store.find(name)
        runs[_unique(path.stem, runs)] = read_run(path)
    request_for(args.kind, runs, choices)
    with whole_file(args.output, args.force) as file:
        write_figure(lambda: draw_runs(args.kind, runs, choices), args.output.suffix.removeprefix("."), file)
    return 0


def _unique(name: str, taken: dict[str, PlottedRun]) -> str:
    number = 1
    while (unique := name if number == 1 else f"{name} ({number})") in taken:
        number += 1
    return unique


verbs.register("plot")(Verb("results as a picture for a paper: .png, .svg or .pdf", EXAMPLES, prepare, run))
