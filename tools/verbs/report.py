"""`opgrip plot` and `opgrip report`: plots of results, and an HTML page of results and traces."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.cli.command import add_reading, counted, unique_name
from opgrip.cli.output_files import check_writable, whole_file
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError
from opgrip.replay.reports.plots import PlottedRun, plots
from opgrip.tools.verbs import add_output, report_output, verb
from opgrip.tools.verbs.results import add_store

if TYPE_CHECKING:
    from opgrip.replay.reports.outcome import Results
    from opgrip.traces.table.trace import Trace
    from opgrip.zoo.corpus import Corpus

PLOT_EXAMPLES = """\
examples:
  opgrip plot modes.json --kind modes -o modes.pdf                   results of opreplay --mode jit,compile
  opgrip plot modes.json --kind modes --by op -o operators.svg
  opgrip plot modes.json --kind operators -o time.svg
  opgrip plot threads.json --kind scaling -o threads.pdf             results of opreplay --threads 1,2,4
  opgrip plot modes.json --kind shapes --op 'aten.conv*' -o conv.pdf
  opgrip plot roofline.json --kind roofline -o roofline.pdf          results of opreplay --roofline
  opgrip plot latest~2 latest~1 latest --kind history -o history.png
"""


def prepare_plot(parser: argparse.ArgumentParser) -> None:
    kinds = "; ".join(f"{name}: {plot.summary}" for name, plot in plots.items())
    parser.add_argument("results", nargs="+", metavar="RESULTS", help="results file, or run of the results store")
    add_store(parser)
    parser.add_argument("--kind", required=True, choices=plots.names(), help=f"kind of plot: {kinds}")
    add_output(parser, "picture to write: .png, .svg or .pdf", required=True)
    parser.add_argument("--op", metavar="GLOB", help="plot only cases of matching operators, such as 'aten.conv*'")
    parser.add_argument("--case", metavar="KEY", help="plot only cases whose `key` in the results begins with KEY")
    parser.add_argument(
        "--by", metavar="WORD", help="group cases by family or op, or with --kind operators also by module"
    )
    parser.add_argument(
        "--over",
        metavar="WORD",
        help="x axis; with --kind scaling: threads, batch_scale or streams; with --kind shapes: bytes or flops",
    )
    parser.add_argument("--title", metavar="TEXT", help="title of the plot (default: trace, machine, version of torch)")


@verb("plot", "plot results as .png, .svg or .pdf", PLOT_EXAMPLES, prepare_plot)
def run_plot(args: argparse.Namespace) -> int:
    from opgrip.cli.output_files import check_writable, whole_file
    from opgrip.display.figures import check_plottable, write_figure
    from opgrip.replay.reports.comparison.results_store import Store
    from opgrip.replay.reports.outcome import Results
    from opgrip.replay.reports.plots import PlotChoices, check_choices, draw_runs, request_for

    choices = PlotChoices(args.op, args.case, args.by, args.over, args.title)
    check_choices(args.kind, len(args.results), choices)
    check_plottable(args.output)
    check_writable(args.output, args.force)
    store = Store(args.store)
    runs: dict[str, PlottedRun] = {}
    for name in args.results:
        path = store.find(name)
        runs[unique_name(path.stem, runs)] = Results.load(path)
    request_for(args.kind, runs, choices)
    with whole_file(args.output, args.force) as file:
        write_figure(lambda: draw_runs(args.kind, runs, choices), args.output.suffix.removeprefix("."), file)
    report_output(args, f"{args.kind} of {counted(len(runs), 'run')}")
    return 0


REPORT_EXAMPLES = """\
examples:
  opgrip report results.json -o report.html
  opgrip report results.json trace:faster_rcnn -o report.html     adds source lines, timeline and values of the trace
  opgrip report h100.parquet l4.parquet -o devices.html           several runs side by side
  opgrip report zoo -o zoo.html                                   a summary of many traces
  opgrip report latest -o report.html                             the newest run of the store
  opgrip report results -o history.html                           the 20 newest runs of a store
"""
SUFFIXES = (".json", ".parquet", ".csv")  # suffixes of results files; any other input is a trace, or a run of the store
MOST_RUNS = 20  # maximum number of runs of a store on a page; the newest are shown


def prepare_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="RESULTS|TRACE",
        help="results file, run of the results store, folder of a store, trace, folder of traces, or zoo",
    )
    add_store(parser)
    add_output(parser, "HTML file to write", required=True)
    parser.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="CONDITION",
        help="condition for each run in comparison with the first, as in opgrip compare; can be repeated (default: "
        "slower<=5%%, failed<=0, changed<=0: no row is more than 5%% slower, and none fails or has other results)",
    )
    parser.add_argument("--title", metavar="TEXT", help="title of the page (default: names of the results and traces)")
    add_reading(parser)


@verb("report", "show results and traces in one HTML file that opens offline", REPORT_EXAMPLES, prepare_report)
def run_report(args: argparse.Namespace) -> int:
    from opgrip.replay.reports.comparison.comparison import parse_gate
    from opgrip.tools.report import make_page
    from opgrip.tools.report.page import GATES, plotly, tables
    from opgrip.zoo.corpus.corpus import is_several

    for text in args.gate:
        parse_gate(text)
    if args.output.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{args.output} is not an HTML file", "choose a name that ends with .html")
    check_writable(args.output, args.force)
    plotly()
    tables()
    runs: dict[str, Results] = {}
    traces: dict[str, Trace] = {}
    stores = {name: newest for name in args.inputs if (newest := _newest_runs(Path(name)))}
    together = [name for name in args.inputs if name not in stores and is_several(name)]
    corpus = _corpus(together, args) if together else None
    for name in args.inputs:
        for run_name, results in stores.get(name, ()):
            runs[unique_name(run_name, runs)] = results
        if name not in stores and name not in together:
            _add(name, args, runs, traces)
    title = args.title or ", ".join([*stores, *(runs if not stores else ()), *traces, *together])
    page = make_page(runs, traces, title, corpus, args.gate or GATES)
    with whole_file(args.output, args.force) as file:
        file.write(page.encode(errors="backslashreplace"))
    report_output(args, f"{len(page) / 1e6:,.1f} MB")
    return 0


def _add(name: str, args: argparse.Namespace, runs: dict[str, Results], traces: dict[str, Trace]) -> None:
    from opgrip.replay.reports.comparison.results_store import Store
    from opgrip.replay.reports.outcome import Results
    from opgrip.traces import load

    path = Path(name)
    store = Store(args.store)
    if path.suffix in SUFFIXES or store.holds(name):
        file = path if path.suffix in SUFFIXES else store.find(name)
        runs[unique_name(file.stem, runs)] = Results.load(file)
    else:
        with Reporter(args.prog).reading(name):
            traces[unique_name(path.name, traces)] = load(name, args.partial, args.unbounded)


def _newest_runs(folder: Path) -> list[tuple[str, Results]]:
    from opgrip.replay.reports.comparison.results_store import Store

    newest: list[tuple[str, Results]] = []
    for run_report in reversed(Store(folder).runs() if folder.is_dir() else []):
        try:
            newest.append((run_report.name, run_report.load()))
        except UserError:
            # not a file of results
            continue
        if len(newest) == MOST_RUNS:
            break
    return newest[::-1]


def _corpus(inputs: list[str], args: argparse.Namespace) -> Corpus:
    from opgrip.zoo.corpus import read_corpus

    reporter = Reporter(args.prog)
    return read_corpus(inputs, args.partial, args.unbounded, reporter.reading)
