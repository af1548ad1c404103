"""Options of the verbs about results, many traces and samples, such as `opgrip results list`."""

from __future__ import annotations

import argparse
from pathlib import Path

from opgrip.capture.program.capture_choices import CALLS, GRIPS
from opgrip.cli.command import add_reading, positive
from opgrip.cli.option_types import percent
from opgrip.replay.operators.admission import extension_of
from opgrip.replay.reports.plots import plots
from opgrip.tools.verbs import add_output, add_top, declare


def add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help="folder of the results store (default: $OPGRIP_STORE)",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    names = "results file, run of the results store (or the start or end of its name), or latest for the newest run"
    parser.add_argument("which", metavar="RUN", help=names)
    add_store(parser)


LIST_EXAMPLES = """\
examples:
  opgrip results list
  opgrip results list --trace '*faster_rcnn*'
  opgrip results list --store /shared/results --json | jq '.[].name'
"""


@declare("results list", "list the runs of the results store", LIST_EXAMPLES, "results:run_list")
def prepare_list(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    parser.add_argument("--trace", metavar="GLOB", help="list only runs of traces whose names match")
    parser.add_argument("--machine", metavar="GLOB", help="list only runs on machines whose names match")
    parser.add_argument("--json", action="store_true", help="print a JSON list with all facts about each run")


PRUNE_EXAMPLES = """\
examples:
  opgrip results prune
  opgrip results prune --keep 10 --store /shared/results
"""


@declare("results prune", "remove all but the newest runs of the results store", PRUNE_EXAMPLES, "results:run_prune")
def prepare_prune(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    parser.add_argument(
        "--keep", type=positive, default=50, metavar="N", help="number of newest runs to keep (default: %(default)s)"
    )


MERGE_EXAMPLES = """\
examples:
  opgrip results merge zoo-*-of-16.json -o zoo.json              shards of one replay, from opreplay --shard
  opgrip results merge part1.json part2.json -o all.json         parts of one replay, from --start and --stop
  opgrip results merge mon.parquet tue.parquet -o week.parquet   repeats, so that compare knows how much times vary
"""


@declare("results merge", "merge several results files into one", MERGE_EXAMPLES, "results:run_merge")
def prepare_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="results file, or run of the results store")
    add_store(parser)
    add_output(parser, "results file to write", required=True)


SCORE_EXAMPLES = """\
examples:
  opgrip results score latest
  opgrip results score zoo.parquet --baseline other-machine.json.zst
  opgrip results score one.parquet --baseline other.parquet      two replays of trace:zoo_500
  opgrip results score zoo.parquet --json > score.json

docs/score.md explains the score.
"""


@declare(
    "results score",
    "print how fast a device or compiler runs the zoo's models, relative to a baseline",
    SCORE_EXAMPLES,
    "results:run_score",
)
def prepare_score(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--baseline",
        metavar="FILE",
        help="results to compare with: a file that opgrip zoo baseline wrote, or, for a distilled trace, another "
        "replay of it (default: the baseline that ships, or the times in the distilled trace)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: a list with one object per mode")


SHOW_EXAMPLES = """\
examples:
  opgrip results show latest
  opgrip results show 20261123T101500-bert-1f2e3d --top 20
  opgrip results show nightly.parquet
"""


@declare("results show", "show where and how a run was made, and its rows", SHOW_EXAMPLES, "results:run_show")
def prepare_show(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--top", type=positive, metavar="N", help="number of rows to show (default: all)")


COMPARE_EXAMPLES = """\
examples:
  opgrip compare main.json branch.json
  opgrip compare main.json branch.json --gate 'slower<=5%' --gate 'failed<=0' -o comparison.md
  opgrip compare main.json branch.json --gate 'total<=2%' --gate 'op<=10%'
  opgrip compare latest~1 latest --by family          the two newest runs of the store
  opgrip compare a100.json h100.json l4.json --by op  each of several runs with the first

To call a case faster or slower, compare must know how much replays vary: replay with --repeats 5.
exit status: 0 if all gates passed, 1 if one failed, 2 for a usage error, 3 if one is undecided and none failed
gates: slower (each row), total, op, module, family, mode (each group) <=PERCENT; failed, changed, missing <=ROWS
"""


@declare("compare", "compare results and report faster and slower cases", COMPARE_EXAMPLES, "results:run_compare")
def prepare_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "base", metavar="BASE", help="baseline: a results file, or a stored run (see opgrip results list)"
    )
    parser.add_argument("new", nargs="+", metavar="NEW", help="results file or run to compare with the baseline")
    add_store(parser)
    parser.add_argument("--gate", action="append", default=[], metavar="CONDITION", help=GATE_HELP)
    parser.add_argument(
        "--same",
        type=percent,
        metavar="PERCENT",
        help="treat times as equal if they differ by at most this percentage (default: 5%%)",
    )
    parser.add_argument(
        "--by",
        choices=("op", "module", "family", "mode"),
        help="also print a table of the cases, grouped by operator, module, kind of operator (family) or mode",
    )
    parser.add_argument("--all", action="store_true", help="also show unchanged and undecided rows")
    add_output(parser, "write all rows to this file: .json, .csv, .md or .xml (JUnit)")


GATE_HELP = (
    "condition to check, with exit status 1 if it fails and 3 if it is undecided: slower<=5%% for each row, "
    "total<=5%%, op<=5%% (or module, family, mode) for each group, failed<=0, changed<=0, missing<=0; can be repeated"
)
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


@declare("plot", "plot results as .png, .svg or .pdf", PLOT_EXAMPLES, "results:run_plot")
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


REPORT_EXAMPLES = """\
examples:
  opgrip report results.json -o report.html
  opgrip report results.json trace:faster_rcnn -o report.html     adds source lines, timeline and values of the trace
  opgrip report h100.parquet l4.parquet -o devices.html           several runs side by side
  opgrip report zoo -o zoo.html                                   a summary of many traces
  opgrip report latest -o report.html                             the newest run of the store
  opgrip report results -o history.html                           the 20 newest runs of a store
"""


@declare("report", "show results and traces in one HTML file that opens offline", REPORT_EXAMPLES, "results:run_report")
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


BY = ("op", "shape", "dtype", "model", "family", "signature", "row")
ALL = -1
TRACES_HELP = (
    "trace, file of another tool, folder of traces, zoo (the traces of real models that ship), or zoo:PATTERN for some "
    "of them"
)
CORPUS_EXAMPLES = """\
examples:
  opgrip corpus zoo                                     operators by share of time, and how many models call each
  opgrip corpus runs/ step.jsonl --by model             the traces of a folder, and one more
  opgrip corpus zoo:mmdet --by signature --models 2:    signatures that two or more models share
  opgrip corpus zoo --by op --models all                operators that every model calls
  opgrip corpus zoo --coverage                          which of torch's public operators the traces contain
  opgrip corpus zoo --by row -o corpus.parquet          all signatures of all traces, for pandas
"""


@declare("corpus", "summarize many traces in one table", CORPUS_EXAMPLES, "corpus:run")
def prepare_corpus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="TRACE", help=TRACES_HELP)
    parser.add_argument(
        "--by",
        choices=BY,
        default=BY[0],
        help="what each row of the table describes; row means a signature in one trace (default: %(default)s)",
    )
    parser.add_argument(
        "--models",
        type=span,
        metavar="N|A:B|all",
        help="show only rows that occur in this number of models: 1, 2: (two or more), 3:10, or all",
    )
    parser.add_argument(
        "--coverage", action="store_true", help="show which of torch's public operators the traces contain"
    )
    add_top(parser, 30)
    add_output(parser, "write all rows to this file: .json, .csv, .md or .parquet")
    add_reading(parser)


def span(text: str) -> tuple[int, int | None]:
    """Return the smallest and largest number of models from a text such as `2:5`; `all` gives (`ALL`, None)."""
    if text == "all":
        return ALL, None
    first, colon, last = text.partition(":")
    numbers = [number for number in (first, last) if number]
    if not numbers or not all(number.isdecimal() and len(number) < 10 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number ('2'), a range ('2:') or 'all'")
    least, most = int(first or 1), int(last) if last else (None if colon else int(first))
    if most is not None and not 1 <= max(least, 1) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} does not contain a possible number of models")
    return least, most


CASES = 500
DISTILL_EXAMPLES = """\
examples:
  opgrip corpus distill zoo --cases 500 -o bench.jsonl.zst
  opreplay bench.jsonl.zst                                       a score for all models: 28 minutes on two slow cores
  opgrip corpus distill zoo --times baseline -o bench.jsonl.zst  to predict the times of the shipped baseline
  opgrip corpus distill zoo --times one.parquet --check two.parquet -o bench.jsonl.zst

Each chosen case gets a weight, so that together they predict the time of each trace. --times names a replay of the
traces whose times to predict. --check names another replay, and prints its times for each model and trace next to the
predicted ones.
"""


@declare("corpus distill", "write a small trace that represents many models", DISTILL_EXAMPLES, "corpus:run_distill")
def prepare_distill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="TRACE", help=TRACES_HELP)
    parser.add_argument(
        "--cases", type=positive, default=CASES, metavar="N", help="number of cases to choose (default: %(default)s)"
    )
    add_output(parser, "trace file to write", required=True)
    parser.add_argument(
        "--times",
        action="append",
        metavar="RUN",
        help="choose cases that predict the times of a replay, instead of the captured times: a results file, a stored "
        "run, or the word baseline for the one that ships; can be repeated if several files have parts of the results",
    )
    parser.add_argument(
        "--check",
        action="append",
        metavar="RUN",
        help="print how well the chosen cases predict the times of another replay of these traces, given as for "
        "--times; can be repeated",
    )
    add_reading(parser)


GRIP_EXAMPLES = """\
examples:
  opgrip grip train.py --function bbox2delta    a function of the script, into grips/bbox2delta
  opgrip grip train.py --function 'mmdet.models.*:*Coder.decode' -- --epochs 1
  opgrip grip detect.py --function mmdet.structures.bbox:bbox_overlaps --by-reference
"""


@declare(
    "grip",
    "run a script, and write functions that it calls as samples",
    GRIP_EXAMPLES,
    "sample_verbs:run_grip",
    runs_program=True,
)
def prepare_grip(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", metavar="SCRIPT", help="Python script to run; its arguments follow --")
    parser.add_argument(
        "--function",
        action="append",
        required=True,
        metavar="NAME",
        help="function to record: its name in the script, or module:function; wildcards are allowed; can be repeated",
    )
    parser.add_argument(
        "--to", type=Path, default=Path(GRIPS), metavar="FOLDER", help="folder for the samples (default: %(default)s)"
    )
    parser.add_argument(
        "--calls",
        type=positive,
        default=CALLS,
        metavar="N",
        help="number of calls to keep per function (default: %(default)s)",
    )
    parser.add_argument(
        "--per-signature",
        type=positive,
        default=1,
        metavar="N",
        help="number of these calls that may have the same signature (default: %(default)s)",
    )
    parser.add_argument(
        "--by-reference", action="store_true", help="refer to functions by import path instead of copying their code"
    )


LONGTAIL_EXAMPLES = """\
examples:
  opgrip longtail trace:faster_rcnn
  opgrip longtail traces/*.jsonl.gz --top 50 -o longtail.csv    of several models
  opgrip longtail step.jsonl --bandwidth 3350                   estimate for memory with 3,350 GB/s
"""


@declare("longtail", "rank functions that run as many small operators", LONGTAIL_EXAMPLES, "sample_verbs:run_longtail")
def prepare_longtail(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="a trace, or a file of another tool")
    add_top(parser, 30)
    parser.add_argument(
        "--bandwidth",
        type=gigabytes,
        metavar="GB/S",
        help="memory bandwidth with which savings are estimated (default: measured on the device of each trace)",
    )
    add_output(parser, "write all rows to this file: .json or .csv")
    add_reading(parser)


def gigabytes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a bandwidth in GB/s above 0")
    return number * 1e9


SAMPLES_LIST_EXAMPLES = """\
examples:
  opgrip samples list
  opgrip samples list --tag ForLoop --tag InputAware    samples with both tags
  opgrip samples list --source mmdetection '*_loss'
"""


@declare("samples list", "list the samples of the package", SAMPLES_LIST_EXAMPLES, "sample_verbs:run_list")
def prepare_samples_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="GLOB", help="list only samples whose names match")
    parser.add_argument(
        "--tag", action="append", default=[], metavar="TAG", help="list only samples with this tag; can be repeated"
    )
    parser.add_argument(
        "--source",
        metavar="TEXT",
        help="list only samples from projects whose name or URL contains this text or pattern",
    )


SAMPLES_SHOW_EXAMPLES = """\
examples:
  opgrip samples show delta2bbox
  opgrip samples show nms | less
"""


@declare(
    "samples show",
    "show the description, inputs and source of a sample",
    SAMPLES_SHOW_EXAMPLES,
    "sample_verbs:run_show",
)
def prepare_samples_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the sample")


TAGS_EXAMPLES = """\
examples:
  opgrip samples tags
"""


declare(
    "samples tags",
    "list the tags of samples, with the number of samples that have each",
    TAGS_EXAMPLES,
    "sample_verbs:run_tags",
)(None)


CANDIDATE_INIT_EXAMPLES = """\
examples:
  opgrip candidate init aten._softmax.default step.jsonl -o softmax.py
  opgrip candidate init own.half.default step.jsonl --extension own_ops.py -o half.py
  opgrip candidate init sample:delta2bbox -o delta2bbox.py
  opgrip candidate init grips/soft_nms -o soft_nms.py
  opgrip candidate init module:backbone.layer1.1 trace:faster_rcnn -o block.py
"""


@declare(
    "candidate init",
    "write a Python file from which to start your own implementation of an operator",
    CANDIDATE_INIT_EXAMPLES,
    "sample_verbs:run_candidate",
)
def prepare_candidate_init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "operator",
        metavar="OPERATOR",
        help="full name of an operator in the trace, module:PATH for a module, sample:NAME for a shipped sample, or a "
        "folder that opgrip grip wrote",
    )
    parser.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help="a trace; omit it for a sample")
    parser.add_argument(
        "--extension",
        action="append",
        default=[],
        type=extension_of,
        metavar="MODULE|FILE",
        help="module or file to import, which registers the operator; can be repeated",
    )
    add_output(parser, ".py file to write", required=True)
    add_reading(parser)
