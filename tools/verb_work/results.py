"""The verbs about results that opreplay stored, `opgrip plot` and `opgrip report`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path

from opgrip.cli.command import counted, printable, unique_name
from opgrip.cli.output_files import check_writable, whole_file
from opgrip.cli.progress import Reporter
from opgrip.display.figures import check_plottable, write_figure
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
from opgrip.replay.reports.comparison.comparison import compare, exit_status, hold_all, margin_for, parse_gate
from opgrip.replay.reports.comparison.comparison_report import form_for, print_comparison, write_comparisons
from opgrip.replay.reports.comparison.results_store import Store, merge_runs, missing_shards
from opgrip.replay.reports.outcome import Results, write_results
from opgrip.replay.reports.plots import PlotChoices, PlottedRun, check_choices, draw_runs, request_for
from opgrip.replay.reports.results_table import print_results
from opgrip.replay.results.results import summarize
from opgrip.tools.report import make_page
from opgrip.tools.report.page import GATES, plotly, tables
from opgrip.tools.verbs import report_output
from opgrip.traces import load
from opgrip.traces.table.trace import Trace
from opgrip.zoo.corpus import Corpus, read_corpus
from opgrip.zoo.corpus.corpus import is_several
from opgrip.zoo.scoring.baselines import read_baselines
from opgrip.zoo.scoring.score_table import plain_of, print_scores
from opgrip.zoo.scoring.scores import distilled_scores, represented_times, score_of


def read_runs(store: Path | None, *names: str) -> list[Results]:
    return [Results.load(Store(store).find(name)) for name in names]


MOST_OF_NAME = 60  # maximum number of characters of a cell


def run_list(args: argparse.Namespace) -> int:
    store = Store(args.store)
    rows = []
    for run in store.runs():
        about = run.summary()
        if fnmatchcase(about.trace, args.trace or "*") and fnmatchcase(about.machine, args.machine or "*"):
            rows.append((run, about))
    if args.json:
        json.dump([{"name": run.name, "path": str(run.path), **asdict(about)} for run, about in rows], sys.stdout)
        print()
        return 0
    if not rows:
        print(f"{args.prog}: {store.folder} contains no matching runs: opreplay --store adds one", file=sys.stderr)
        return 0
    columns = [
        TableColumn("run", lambda row: row[0].name, most=MOST_OF_NAME),
        TableColumn("machine", lambda row: row[1].machine, rank=4, most=MOST_OF_NAME),
        TableColumn("device", lambda row: row[1].device, rank=3, most=MOST_OF_NAME),
        TableColumn("trace", lambda row: row[1].trace, most=MOST_OF_NAME),
        TableColumn("modes", lambda row: ", ".join(row[1].modes), rank=2, most=MOST_OF_NAME),
        TableColumn("dtype", lambda row: ", ".join(row[1].dtypes), most=MOST_OF_NAME, when=lambda row: row[1].dtypes),
        TableColumn("torch", lambda row: row[1].torch, rank=5, most=MOST_OF_NAME),
        TableColumn("cases", lambda row: row[1].cases, ",d"),
        TableColumn("ok rows", lambda row: row[1].ok, ",d"),
    ]
    print_table(columns, rows, sys.stdout)
    return 0


def run_prune(args: argparse.Namespace) -> int:
    store = Store(args.store)
    removed = counted(len(store.prune(args.keep)), "run")
    print(f"{args.prog}: removed {removed} from {store.folder}, {len(store.runs())} left", file=sys.stderr)
    return 0


MOST_NAMED = 20  # maximum number of missing shards to list


def run_merge(args: argparse.Namespace) -> int:
    check_writable(args.output, args.force)
    merged = merge_runs(read_runs(args.store, *args.runs))
    write_results(merged.rows, merged.header, args.output, args.force)
    report_output(args, counted(len(merged), "row"))
    if missing := missing_shards(merged.header):
        which = ", ".join(map(str, missing[:MOST_NAMED])) + (" and more" if len(missing) > MOST_NAMED else "")
        print(f"{args.prog}: {counted(len(missing), 'shard')} missing: {which}", file=sys.stderr)
    return 0


def run_score(args: argparse.Namespace) -> int:
    baseline = args.baseline
    (results,) = read_runs(args.store, args.which)
    if represented_times(results.header) is not None:
        scores = distilled_scores(results, None if baseline is None else read_runs(args.store, baseline)[0])
    else:
        scores = score_of(results, read_baselines(None if baseline is None else Path(baseline)))
    if not scores:
        raise UserError("these results do not belong to the zoo", "create them with opreplay zoo -o results.parquet")
    if args.json:
        json.dump([plain_of(score) for score in scores], sys.stdout, indent=1)
        print()
    else:
        print_scores(scores, sys.stdout)
    return 0


MOST_OF_FACT = 400  # maximum number of characters of a fact, such as what the cases of a distilled trace represent


def run_show(args: argparse.Namespace) -> int:
    (results,) = read_runs(args.store, args.which)
    nested_names = ("environment", "accelerator", "ceilings")
    facts = {name: value for name, value in results.header.items() if name not in nested_names}
    environment = results.header.get("environment", {})
    lines = [*facts.items(), *(item for item in environment.items() if item not in facts.items())]
    width = max((len(printable(name)) for name, _ in lines), default=0)
    for name, value in lines:
        if isinstance(value, dict):
            is_long = {key: isinstance(item, dict | list) and len(item) > MOST_ITEMS for key, item in value.items()}
            value = {key: f"{len(item):,} items" if is_long[key] else item for key, item in value.items()}
        text = printable(value if isinstance(value, str) else json.dumps(value))
        shown = text if len(text) <= MOST_OF_FACT else f"{text[:MOST_OF_FACT]}... ({len(text):,} characters)"
        print(f"{printable(name):<{width}}  {shown}")
    rows = list(results.rows)
    print()
    print_results(rows[: args.top], sys.stdout)
    print(summarize(rows))
    return 0


MOST_ITEMS = 20  # maximum number of items of a list or object in a fact; of a longer one only the number is shown


def run_compare(args: argparse.Namespace) -> int:
    gates = list(map(parse_gate, args.gate))
    if args.output is not None:
        form_for(args.output)
        check_writable(args.output, args.force)
    base, *others = read_runs(args.store, args.base, *args.new)
    margin = args.same if args.same is not None else margin_for(gates)
    comparisons = [compare(base, new, margin) for new in others]
    held = [hold_all(gates, comparison) for comparison in comparisons]
    for comparison, outcomes in zip(comparisons, held, strict=True):
        print_comparison(comparison, sys.stdout, args.by, args.all, outcomes)
    if args.output is not None:
        write_comparisons(comparisons, gates, args.output, args.force)
        report_output(args, counted(len(comparisons), "comparison"))
    return exit_status([item for outcomes in held for item in outcomes])


def run_plot(args: argparse.Namespace) -> int:
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


SUFFIXES = (".json", ".parquet", ".csv")  # suffixes of results files; any other input is a trace, or a run of the store
MOST_RUNS = 20  # maximum number of runs of a store on a page; the newest are shown


def run_report(args: argparse.Namespace) -> int:
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
    path = Path(name)
    store = Store(args.store)
    if path.suffix in SUFFIXES or store.holds(name):
        file = path if path.suffix in SUFFIXES else store.find(name)
        runs[unique_name(file.stem, runs)] = Results.load(file)
    else:
        with Reporter(args.prog).reading(name):
            traces[unique_name(path.name, traces)] = load(name, args.partial, args.unbounded)


def _newest_runs(folder: Path) -> list[tuple[str, Results]]:
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
    reporter = Reporter(args.prog)
    return read_corpus(inputs, args.partial, args.unbounded, reporter.reading)
