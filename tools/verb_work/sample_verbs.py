"""`opgrip longtail`, `grip`, `samples` and `candidate init`: find, extract, list and replace long-tail functions."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from operator import itemgetter
from pathlib import Path

from opgrip.capture.command.opcapture import own_cost
from opgrip.capture.command.script import check_script, run_script
from opgrip.capture.grip.gripped import Keep
from opgrip.capture.grip.gripping import Grips
from opgrip.capture.grip.patterns import parse_pattern
from opgrip.cli.command import USAGE_ERROR, counted, printable
from opgrip.cli.output_files import check_output, whole_file
from opgrip.cli.progress import Reporter
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
from opgrip.replay.cases.sources.samples import PREFIX, find_samples
from opgrip.replay.modes.candidate import OF_MODULES
from opgrip.samples import Tag, samples
from opgrip.tools.exports.candidate_template import file_of_module, file_of_operator, file_of_sample, outlines
from opgrip.tools.verbs import report_output
from opgrip.traces import Trace, load
from opgrip.traces.analysis.longtail import bandwidth_of, find_longtail, print_longtail, write_rows
from opgrip.traces.io.reader import TraceReader


def run_grip(args: argparse.Namespace) -> int:
    program = [args.script, *args.program]
    check_script(program)
    patterns = [parse_pattern(name if ":" in name else f"__main__:{name}") for name in args.function]
    grips = Grips(patterns, Keep(args.calls, args.per_signature, by_reference=args.by_reference), args.to)
    with grips:
        status = run_script(program, grips.script_compiler())
    grips.finish()
    for folder in grips.written:
        print(f"opgrip grip: wrote a sample to {folder}: run it with pytest", file=sys.stderr)
    for name, reason in grips.refused.items():
        print(f"opgrip grip: error: {printable(name)} was not gripped: {printable(reason)}", file=sys.stderr)
    return status or (USAGE_ERROR if grips.refused else 0)


def run_longtail(args: argparse.Namespace) -> int:
    check_output(args.output, args.force, (".json", ".csv"))
    bandwidth = bandwidth_of if args.bandwidth is None else lambda trace: args.bandwidth
    longtail = find_longtail(_load(args.traces, args, Reporter(args.prog)), bandwidth, own_cost())
    print_longtail(longtail, args.top, sys.stdout)
    if args.output is not None:
        write_rows(longtail, args.output, args.force)
        report_output(args, counted(len(longtail.functions), "function"))
    return 0


def _load(paths: Iterable[Path], args: argparse.Namespace, reporter: Reporter) -> Iterator[Trace]:
    for path in paths:
        with reporter.reading(path):
            trace = load(path, args.partial, args.unbounded)
        if not trace.distinct_calls["function"].notna().any():
            raise UserError(
                f"{path} does not contain the Python functions that made its calls", "record the program with opcapture"
            )
        yield trace


COLUMNS = (
    TableColumn("name", itemgetter(0), least=30),
    TableColumn("family", itemgetter(1), least=10, rank=1),
    TableColumn("tags", itemgetter(2), least=24),
    TableColumn("project", itemgetter(3), rank=2),
    TableColumn("", itemgetter(4)),
)


def run_list(args: argparse.Namespace) -> int:
    samples = find_samples(patterns=args.names, tags=args.tag)
    if not samples:
        raise UserError("no sample matches these names and tags", "opgrip samples list shows all")
    if args.source is not None:
        pattern = f"*{args.source.lower()}*"
        samples = [item for item in samples if fnmatchcase(f"{item.project} {item.url}".lower(), pattern)]
        if not samples:
            raise UserError(f"no sample is from {args.source!r}", "opgrip samples list shows all projects")
    rows = [
        (
            sample.name,
            sample.family,
            " ".join(sorted(tag.value for tag in sample.tags)),
            sample.project,
            "jax" if sample.has_jax() else "",
        )
        for sample in samples
    ]
    if not sys.stdout.isatty():
        sys.stdout.writelines("\t".join(row) + "\n" for row in rows)
        return 0
    print_table(COLUMNS, rows, sys.stdout)
    print(counted(len(rows), "sample"))
    return 0


def run_show(args: argparse.Namespace) -> int:
    (sample,) = find_samples(args.name)
    print(f"name      {sample.name}, in {sample.family}")
    print(f"tags      {' '.join(sorted(tag.value for tag in sample.tags)) or 'none'}")
    print(f"source    {sample.project}, {sample.url}")
    print(f"in JAX    {'yes' if sample.has_jax() else 'no'}")
    for configuration in sample.configurations:
        print(f"inputs    {configuration}: {outlines(sample.arguments(configuration), {})}")
    print(f"run it    opreplay {PREFIX}{sample.name} --mode eager,compile\n")
    print(inspect.getsource(sys.modules[sample.function.__module__]), end="")
    return 0


def run_tags(args: argparse.Namespace) -> int:
    for tag in Tag:
        count = sum(tag in sample.tags for sample in samples().values())
        print(f"{tag.value:<20}{count:>5}  {tag.meaning}")
    return 0


def run_candidate(args: argparse.Namespace) -> int:
    is_sample = args.operator.startswith("sample:") or Path(args.operator).is_dir()
    if is_sample != (args.trace is None):
        what = f"{args.operator} takes no trace" if is_sample else "a trace is missing"
        raise UserError(what, "opgrip candidate init OPERATOR TRACE, or a sample without a trace")
    check_output(args.output, args.force, (".py", ".pyw"))

    reporter = Reporter(args.prog)
    if is_sample:
        template = file_of_sample(args.operator)
    else:
        with reporter.reading(args.trace):
            trace = load(args.trace, args.partial, args.unbounded, TraceReader(args.trace, args.unbounded))
        if args.operator.startswith(OF_MODULES):
            path = args.operator.removeprefix(OF_MODULES)
            template = file_of_module(trace, str(args.trace), path)
        else:
            template = file_of_operator(trace, str(args.trace), args.operator, args.extension)
    with whole_file(args.output, args.force) as file:
        file.write(template.text(args.output).encode())
    report_output(args, f"a function to replace by an implementation of {args.operator}")
    print(f"{args.prog}: judge it with: {template.command(args.output)}", file=sys.stderr)
    return 0
