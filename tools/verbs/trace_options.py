"""Options of the verbs about one trace or several, such as `opgrip trace info`."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from opgrip.cli.command import UNBOUNDED_HELP, add_reading
from opgrip.cli.option_types import Cut, names, percent
from opgrip.cli.options import add_options
from opgrip.display.tables import TableColumn, print_table
from opgrip.tools.verbs import add_capture, add_filters, add_output, add_top, declare

TRACE_INFO_EXAMPLES = """\
examples:
  opgrip trace info trace:faster_rcnn
  opgrip trace info trace:faster_rcnn --top 30 | less
  opgrip trace info trace:faster_rcnn --by function --by line
  opgrip trace info llama.jsonl --label decode --by signature
  opgrip trace info ranges.json --sample 100                  100 of the million cases that ranges.json describes
  opgrip trace info model.onnx                                  files of other tools: docs/formats.md
"""


@declare("trace info", "show the contents of a trace", TRACE_INFO_EXAMPLES, "trace_info:run")
def prepare_trace_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, or a file of another tool")
    add_top(parser, 12, "rows in each table")
    parser.add_argument(
        "--by",
        choices=tuple(TABLES),
        action="append",
        help="print a table of times grouped by this; can be repeated (default: op and module)",
    )
    add_filters(parser, "tables only of calls", "label", "phase")
    parser.add_argument("--json", action="store_true", help="print the tables as JSON, with all rows")
    add_capture(parser)
    add_output(parser, "write all rows of the tables to this file: .json or .csv")
    add_options(parser, Cut)
    add_reading(parser)


@dataclass(frozen=True, slots=True)
class Group:
    title: str
    columns: tuple[str, ...]


SIGNATURE = "signature"
# tables by their name on the command line; a call in a backward pass is counted with the forward code that caused it
GROUPS = {
    "op": Group("operators", ("op",)),
    "module": Group("modules", ("module", "phase")),
    "function": Group("functions", ("function", "file", "phase")),
    "phase": Group("phases", ("phase",)),
    "label": Group("innermost labels", ("label",)),
    SIGNATURE: Group("signatures", ("op", "shapes")),
    "device": Group("devices", ("device",)),
    "stream": Group("streams", ("device", "stream")),
    "line": Group("lines", ("file", "line", "function", "phase")),
}
KERNEL = "kernel"
TABLES = {**GROUPS, KERNEL: Group("kernels", ("kernel", "op"))}  # the tables in `GROUPS`, and the table of kernels
OWN = "opgrip"
OWN_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
CONVERT_EXAMPLES = """\
examples:
  opgrip trace convert --formats                                  the formats that can be read or written
  opgrip trace convert inputs.txt calls.jsonl                     the format is detected by content
  opgrip trace convert trace:faster_rcnn inputs.txt --to tritonbench
  opgrip trace convert step.jsonl inputs.txt --report loss.json   also list what inputs.txt does not contain
  opgrip trace convert ranges.json some.jsonl --sample 100        100 of the million cases that ranges.json describes
"""


@declare(
    "trace convert", "convert between traces and files of other tools", CONVERT_EXAMPLES, "trace_convert:run_convert"
)
def prepare_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="IN", help="a trace, or a file of another tool")
    parser.add_argument(
        "output", type=Path, metavar="OUT", help="file to write, or new folder for the format flashinfer"
    )
    parser.add_argument(
        "--formats", action=_ListFormats, nargs=0, help="list the formats that can be read or written, and exit"
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="FORMAT",
        help="format of IN, one of --formats (default: detected from its content)",
    )
    parser.add_argument("--to", metavar="FORMAT", help="format of OUT, one of --formats (default: from its suffix)")
    add_capture(parser)
    add_options(parser, Cut)
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="also write a JSON file that lists the calls that were not converted, and which facts about the converted "
        "calls OUT does not contain",
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    add_reading(parser)


class _ListFormats(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from opgrip.traces.io.foreign_files import formats

        rows = [(OWN, "read, written", ", ".join(OWN_SUFFIXES), "traces of opcapture")]
        for name, item in formats.items():
            ways = ("read" if item.read is not None else "", "written" if item.is_written else "")
            rows.append((name, ", ".join(filter(None, ways)), ", ".join(item.suffixes), item.summary))
        headings = ("format", "access", "suffixes", "description")
        columns = [TableColumn(heading, itemgetter(place)) for place, heading in enumerate(headings)]
        print_table(columns, rows, sys.stdout)
        parser.exit()


CALL, UNITS = "call", ("call", "module", "function")
MODE = re.compile(r"eager|compile(-dynamic)?(:[A-Za-z0-9_]+)?|b?float16|candidate:[^=]+\.py:[A-Za-z_]\w*")
MODES = "eager, compile, compile-dynamic, compile:BACKEND, candidate:FILE.py:FUNCTION, bfloat16 or float16"
EXPORT_EXAMPLES = """\
examples:
  opgrip trace export-case trace:faster_rcnn 17 -o case.py && python case.py
  opgrip trace export-case step.jsonl 17 --mode compile -o case.py        compares the compiled call with eager
  opgrip trace export-case step.jsonl blocks.0 --unit module --mode compile -o repro.py
  opgrip trace export-case step.jsonl 'blocks.0 backward' --unit module --mode compile:aot_eager -o repro.py
  opgrip trace export-case grips/Block_forward 0 --mode compile -o repro.py     from source, kept by opcapture --grip
"""


@declare(
    "trace export-case",
    "write a case as a Python script that only needs torch",
    EXPORT_EXAMPLES,
    "trace_convert:run_export",
)
def prepare_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="a trace, a file of another tool, or a folder of a gripped sample"
    )
    parser.add_argument(
        "case",
        metavar="CASE",
        help="number of the case in opreplay --list; with --unit, name of the module or function as in the rows of "
        "opreplay; for a sample, number of its call, from 0",
    )
    parser.add_argument(
        "--unit",
        choices=UNITS,
        default=CALL,
        help="what to export: one call, or all recorded operators of a module or function, as one function "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--mode",
        type=_mode,
        default="eager",
        metavar="MODE",
        help="mode in which the script runs the case, in addition to eager: " + MODES + " (default: %(default)s)",
    )
    add_output(parser, ".py file to write", required=True)
    add_options(parser, Cut)
    add_reading(parser)


def _mode(text: str) -> str:
    if MODE.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not {MODES}")
    return text


TUNER_NAMES = ("aiter", "tunableop", "hipblaslt", "benchdnn", "triton")
TUNER_EXAMPLES = """\
examples:
  opgrip trace tuner step.jsonl --for aiter -o untuned.csv
  opgrip trace tuner step.jsonl --for tunableop -o tunableop_untuned0.csv
  opgrip trace tuner step.jsonl --tuned tunableop_results0.csv     which share of the time has a tuned entry
"""


@declare(
    "trace tuner",
    "write recorded shapes for tuners of kernels, or find which are already tuned",
    TUNER_EXAMPLES,
    "trace_convert:run_tuner",
)
def prepare_tuner(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, or a file of another tool")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--for", dest="tuner", choices=TUNER_NAMES, help="tuner for which to list the recorded shapes")
    what.add_argument(
        "--tuned",
        type=Path,
        metavar="FILE",
        help="print the share of the time taken by calls whose shapes have an entry in this file, which a tuner wrote",
    )
    add_output(
        parser, "file for the list; lists of other kinds go next to it, with the kind in the name (default: stdout)"
    )
    add_reading(parser)


ANY = "any"
DIFF_EXAMPLES = """\
examples:
  opgrip trace diff main.jsonl branch.jsonl
  opgrip trace diff main.jsonl branch.jsonl --fail-on came,went -o difference.md
  opgrip trace diff monday/ friday/ -o shifts.json       all traces of two folders, such as the recordings of a service
  opgrip trace diff 'monday/*.rank0.jsonl' 'friday/*.rank0.jsonl' --fail-on operators

Two signatures are the same if they call the same operator with arguments of the same shapes, strides, dtypes and
scalars under the same settings; their numbers do not matter, so redacted traces can be compared. Strides and settings
are ignored if one side is a file of another tool, such as a profile. Calls are counted per
step if the traces record steps, and in total if a side has several traces.
Kinds of differences: came (signatures only in B), went (only in A), counts (other numbers of calls), shares (other
shares of the time), values (other statistics of values), operators (other shares of the time, whatever the shapes).
exit status: 1 if a difference of a kind in --fail-on was found
"""


@declare("trace diff", "compare two traces, or two sets of traces", DIFF_EXAMPLES, "trace_diff:run_diff")
def prepare_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "before",
        type=Path,
        metavar="A",
        help="a trace, a folder of traces, a pattern of file names, or a file that another tool wrote",
    )
    parser.add_argument(
        "after", type=Path, metavar="B", help="what to compare A with; the same kinds of input as for A"
    )
    parser.add_argument(
        "--fail-on",
        type=names,
        default=(),
        metavar="KINDS",
        help="exit with status 1 if there are differences of these kinds, separated by commas: came (signatures only "
        "in B), went (signatures only in A), counts (numbers of calls), shares (each signature's share of the time), "
        f"values (statistics of tensor values), operators (each operator's share of the time), or {ANY}",
    )
    parser.add_argument(
        "--counts",
        type=percent,
        metavar="PERCENT",
        help="ignore differences of call counts up to this percentage (default: 0, or 10%% with several traces)",
    )
    parser.add_argument(
        "--least",
        type=percent,
        metavar="PERCENT",
        help="ignore new and missing signatures, and changed call counts, with less than this share of the time "
        "(default: 0, or 0.1%% with several traces)",
    )
    parser.add_argument(
        "--share",
        type=percent,
        default=0.05,
        metavar="PERCENT",
        help="ignore a signature or operator whose share of the total time changed by at most this many percentage "
        "points (default: 5%%)",
    )
    parser.add_argument(
        "--spread",
        type=percent,
        default=0.1,
        metavar="PERCENT",
        help="ignore a change in the mean or spread of tensor values if it is at most this percentage of the spread "
        "(default: 10%%)",
    )
    add_top(parser, 30)
    add_output(parser, "write everything to a .json file, or the rows to a .md file")
    add_reading(parser)


VALIDATE_EXAMPLES = """\
examples:
  opgrip trace validate trace:faster_rcnn
  opgrip trace validate traces/*.jsonl.gz -o findings.json

exit status: 1 if a trace is invalid
"""


@declare("trace validate", "check traces for errors", VALIDATE_EXAMPLES, "trace_diff:run_validate")
def prepare_validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="a trace, or a file of another tool")
    add_top(parser, 50, "findings to show per trace")
    add_output(parser, "write all findings as JSON")
    parser.add_argument("--unbounded", action="store_true", help=UNBOUNDED_HELP)


GRAPH_EXAMPLES = """\
examples:
  opgrip trace graph trace:faster_rcnn                  critical path and live memory
  opgrip trace graph trace:faster_rcnn -o graph.json    every call with its dependencies
"""


@declare(
    "trace graph",
    "show dependencies between calls, the critical path and live memory",
    GRAPH_EXAMPLES,
    "trace_graph:run_graph",
)
def prepare_graph(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, or a file of another tool")
    add_output(parser, "write every call with its dependencies to this .json file")
    add_reading(parser)


TIMELINE_EXAMPLES = """\
examples:
  opgrip trace timeline trace:faster_rcnn -o timeline.json.gz    open it in ui.perfetto.dev
  opgrip trace timeline step.jsonl | jq '.traceEvents[] | select(.cat == "module") | .name'
"""


@declare(
    "trace timeline",
    "write the calls of a trace as a timeline for Perfetto",
    TIMELINE_EXAMPLES,
    "trace_graph:run_timeline",
)
def prepare_timeline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, or a file of another tool")
    add_output(parser, "file to write: .json or .json.gz (default: standard output)")
    add_reading(parser)


MERGE_EXAMPLES = """\
examples:
  opgrip trace merge step.rank0.jsonl step.rank1.jsonl -o step.jsonl
  opgrip trace merge train.jsonl train.pid*.jsonl -o all.jsonl.zst    a process and its DataLoader workers
"""


@declare("trace merge", "join the traces of several processes into one", MERGE_EXAMPLES, "trace_graph:run_merge")
def prepare_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="traces to merge, each of one process")
    add_output(parser, "trace file to write", required=True)
    add_reading(parser)


RANKS_EXAMPLES = """\
examples:
  opgrip trace merge step.rank*.jsonl -o step.jsonl && opgrip trace ranks step.jsonl
  opgrip trace ranks step.jsonl --json | jq '.pairs[0]'
  opgrip trace ranks step.jsonl -o waits.json
"""


@declare("trace ranks", "show which ranks of a job wait for which others", RANKS_EXAMPLES, "trace_graph:run_ranks")
def prepare_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace written by opgrip trace merge")
    add_top(parser, 12, "rows in each of two tables: pairs of ranks, and collectives")
    parser.add_argument("--json", action="store_true", help="print the tables as JSON")
    add_output(parser, "write all tables to a .json file, or the table of ranks to a .csv file")
    add_reading(parser)


TRIM_EXAMPLES = """\
examples:
  opgrip trace trim trace:faster_rcnn -o step.jsonl --steps 1
  opgrip trace trim trace:faster_rcnn -o head.jsonl --module 'roi_head*' --with-producers
  opgrip trace trim train.jsonl -o backward.jsonl.gz --phase backward --time 1.5s:2s

A call is kept if it meets all conditions, together with the calls inside it.
"""
NS_OF = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "": 10**9}


@declare(
    "trace trim",
    "write a part of a trace, selected by step, phase, module, operator, label or time",
    TRIM_EXAMPLES,
    "trace_trim:run_trim",
)
def prepare_trim(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, or a file of another tool")
    add_output(parser, "trace file to write", required=True)
    parser.add_argument(
        "--steps",
        type=steps,
        metavar="FIRST[:END]",
        help="keep only this step, or the steps from FIRST to END (excluded; to the last step if END is missing), "
        "counted from 0; such as 1, 0:2 or '2:'",
    )
    add_filters(parser, "keep only calls", "phase", "module", "op", "label")
    parser.add_argument(
        "--time",
        type=span,
        metavar="START:END",
        help="keep only calls that began in this interval, counted from the start of the trace; such as "
        "1.5s:2s, '100ms:' or ':20us'",
    )
    parser.add_argument(
        "--with-producers", action="store_true", help="also keep the calls that produced inputs of the kept calls"
    )
    add_reading(parser)


def steps(text: str) -> tuple[int, int | None]:
    """Return the first step, and the step after the last one, from a text such as `1`, `0:2` or `2:`."""
    match = re.fullmatch(r"(\d{1,9})|(\d{0,9}):(\d{0,9})", text.strip(), re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step such as 1 or a range such as 0:2")
    if match[1]:
        return int(match[1]), int(match[1]) + 1
    first, end = int(match[2] or 0), int(match[3]) if match[3] else None
    if end is not None and end <= first:
        raise argparse.ArgumentTypeError(f"{text!r} contains no step")
    return first, end


def span(text: str) -> tuple[int, int | None]:
    """Return start and end in ns for a text such as `1.5s:2s`."""
    first, colon, end = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not an interval such as 1.5s:2s")
    begin, until = _nanoseconds(first or "0"), _nanoseconds(end) if end else None
    if until is not None and until <= begin:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it starts")
    return begin, until


def _nanoseconds(text: str) -> int:
    match = re.fullmatch(r"(-?\d{1,12}(?:\.\d{1,9})?)\s*(ns|us|ms|s|)", text.strip(), re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 1.5s or 20ms")
    return round(float(match[1]) * NS_OF[match[2]])


KEPT = ("modules", "functions", "files", "labels", "model", "scalars", "values")
REDACT_EXAMPLES = """\
examples:
  opgrip trace redact step.jsonl -o step.redacted.jsonl.zst
  opgrip trace redact step.jsonl -o out.jsonl --report left.json
  opgrip trace redact friday.jsonl -o out.jsonl --salt-file house.salt --keep modules,labels

Names of modules, functions, files, labels and models become hashes; values of numbers and tensors become defaults;
paths, command lines, times of day and unknown records are removed. Operators and shapes stay.
"""


@declare("trace redact", "remove names, paths, texts and values from a trace", REDACT_EXAMPLES, "trace_trim:run_redact")
def prepare_redact(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, or a file of another tool")
    add_output(parser, "trace file to write", required=True)
    parser.add_argument(
        "--salt-file",
        type=Path,
        metavar="FILE",
        help="file with the salt for hashed names, created if missing; traces with the same salt can be compared "
        "(default: a new salt)",
    )
    parser.add_argument(
        "--keep", type=names, default=(), metavar="KINDS", help=f"kinds of names and values to keep: {','.join(KEPT)}"
    )
    parser.add_argument(
        "--hide-operators",
        action="store_true",
        help="also hash names of custom operators, which can then not be replayed",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="also write a JSON file that lists every text and exact value that stays in the trace",
    )
    add_reading(parser)
