"""`opgrip corpus` and `opgrip corpus distill`: a summary of many traces, and a short trace that represents them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

from opgrip.cli.command import counted, printable
from opgrip.cli.output_files import check_writable
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError, shortened
from opgrip.tools.verb_work.results import read_runs
from opgrip.tools.verbs import report_output
from opgrip.tools.verbs.zoo import summary
from opgrip.traces.zoo import ZooTrace, read_manifest, select, zoo_file
from opgrip.traces.zoo.manifest import FIELD
from opgrip.zoo.corpus import Corpus, read_corpus, summarize
from opgrip.zoo.corpus.distill import (
    IN_PROGRAM,
    check_of,
    describe,
    distill,
    named_by_files,
    print_check,
    with_times,
    write_cases,
)
from opgrip.zoo.corpus.summaries import (
    check_form,
    cover,
    facts_of,
    print_coverage,
    print_summary,
    write_summary,
    write_table,
)
from opgrip.zoo.making import differences_of_new_recording, is_current, make_trace, write_manifest
from opgrip.zoo.scoring.baselines import (
    Times,
    added,
    baseline_of,
    is_replay_of,
    machine_of,
    read_baselines,
    times_of,
    times_of_baseline,
    write_baseline,
)

MOST_NOTES, MOST_NOTE = 10, 200


def say_notes(notes: Sequence[str], reporter: Reporter, more: str = "") -> None:
    for note in notes[:MOST_NOTES]:
        reporter.say(shortened(printable(note), MOST_NOTE))
    if len(notes) > MOST_NOTES:
        reporter.say(f"{len(notes) - MOST_NOTES:,} more files were left out{more}")


def run(args: argparse.Namespace) -> int:
    if args.models and args.by in ("model", "row"):
        raise UserError(f"--models cannot be used with --by {args.by}", "a row belongs to one model only")
    if args.output is not None:
        check_form(args.output)
        check_writable(args.output, args.force)
    reporter = Reporter(args.prog)
    corpus = read_corpus(args.inputs, args.partial, args.unbounded, reporter.reading)
    say_notes(corpus.notes, reporter, "; -o FILE.json lists them")
    (_cover if args.coverage else _summarize)(corpus, args)
    return 0


def _summarize(corpus: Corpus, args: argparse.Namespace) -> None:
    summary = summarize(corpus, args.by)
    if args.models:
        summary = summary.of_models(*args.models)
    print_summary(corpus, summary, args.top, sys.stdout)
    if args.output is not None:
        write_summary(corpus, summary, args.output, args.force)
        report_output(args, counted(len(summary.table), "row"))


def _cover(corpus: Corpus, args: argparse.Namespace) -> None:
    table = cover(corpus)
    print_coverage(table, sys.stdout)
    if args.output is not None:
        write_table(table, args.output, args.force, facts_of(corpus))
        report_output(args, counted(len(table), "row"))


BASELINE = "baseline"  # name that means the shipped baseline, used in place of a run


def run_distill(args: argparse.Namespace) -> int:
    check_writable(args.output, args.force)
    reporter = Reporter(args.prog)
    base, times = _read_times(args.times or [])
    _, check = _read_times(args.check or [], chosen_by=times)
    corpus = read_corpus(args.inputs, args.partial, args.unbounded, reporter.reading)
    say_notes(corpus.notes, reporter)
    corpus = named_by_files(corpus)
    if args.times:
        corpus = with_times(corpus, times)
    distilled = distill(corpus, args.cases)
    fields = {FIELD: distilled.field(corpus, base)}
    write_cases(corpus, distilled.keys, args.output, args.force, args.unbounded, reporter.reading, fields, IN_PROGRAM)
    print(f"{describe(distilled)}: {args.output}")
    if args.check:
        print_check(check_of(corpus, distilled, check), sys.stdout)
    return 0


def _read_times(names: Sequence[str], chosen_by: Times | None = None) -> tuple[str, Times]:
    machine, times = "", dict[tuple[str, str], float]()
    for name in names:
        if name == BASELINE:
            baseline = read_baselines()
            own_machine, own = baseline.machine, times_of_baseline(baseline)
        else:
            (results,) = read_runs(None, name)
            own_machine, own = machine_of(results), times_of(results)
        if machine not in ("", own_machine):
            problem = f"{name} was measured on {own_machine}, the previous results on {machine}"
            raise UserError(printable(problem), "use results of one machine")
        if chosen_by and is_replay_of(own, chosen_by):
            problem = f"--check {name} has the same times as --times"
            raise UserError(printable(problem), "replay the traces again and use those results")
        machine = own_machine
        times |= own
    return machine, times


DIFFERENCES = 10  # maximum number of differing signatures reported per trace


def run_baseline(args: argparse.Namespace) -> int:
    baseline = baseline_of(*read_runs(args.store, args.which))
    if args.add_to is not None:
        baseline = added(read_baselines(args.add_to), baseline)
    write_baseline(baseline, args.output, args.force)
    cases = sum(len(trace.cases) for trace in baseline.traces.values())
    machine = printable(baseline.machine)
    measured = f"{counted(cases, 'case')} of {counted(len(baseline.traces), 'trace')}, measured on {machine}"
    print(f"wrote {measured}, to {args.output}")
    return 0


def run_make(args: argparse.Namespace) -> int:
    reporter = Reporter(args.prog)
    traces = select(args.names, read_manifest())
    if args.check:
        return int(sum(_differs(trace, args.timeout, reporter) for trace in traces) > 0)
    due = [trace for trace in traces if args.force or not is_current(trace)]
    if len(due) < len(traces):
        reporter.say(f"already up to date: {counted(len(traces) - len(due), 'trace')}")
    failures = [trace for trace in due if not _is_made(trace, args.timeout, reporter)]
    reporter.say(summary(select(args.names, read_manifest())))
    if failures:
        reporter.say(f"{counted(len(failures), 'trace')} could not be made")
    return int(bool(failures))


def _is_made(trace: ZooTrace, timeout_s: float, reporter: Reporter) -> bool:
    start = monotonic()
    try:
        with reporter.doing(f"making {trace.name}", measures=False):
            new_trace = make_trace(trace, timeout_s=timeout_s)
    except UserError as error:
        reporter.say(f"error: {error}")
        return False
    _write_down(new_trace)
    held = new_trace.recording
    assert held is not None
    figures = (
        counted(held.calls, "call"),
        counted(held.signatures, "signature"),
        f"{held.size_bytes / 1e3:,.0f} kB",
        f"{monotonic() - start:.0f} s",
    )
    reporter.say(f"{trace.name}: {', '.join(figures)}")
    return True


def _write_down(new_trace: ZooTrace) -> None:
    # the manifest is read again, because recording takes hours in which it may be edited
    traces: Sequence[ZooTrace] = read_manifest()
    write_manifest(
        replace(trace, recording=new_trace.recording)
        if (trace.name, trace.arguments) == (new_trace.name, new_trace.arguments)
        else trace
        for trace in traces
    )


def _differs(trace: ZooTrace, timeout_s: float, reporter: Reporter) -> bool:
    try:
        with reporter.doing(f"making {trace.name} again", measures=False):
            lines = differences_of_new_recording(trace, zoo_file(trace), timeout_s)
    except UserError as error:
        reporter.say(f"error: {error}")
        return True
    reporter.say(f"{trace.name}: {counted(len(lines), 'signature differs', 'signatures differ')}")
    for line in lines[:DIFFERENCES]:
        reporter.say(f"  {line}")
    return bool(lines)
