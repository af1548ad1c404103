"""The command `opreplay`, which replays the calls of a trace and prints tables of their times."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING

from opgrip.cli.command import INTERRUPTED, counted, run_command
from opgrip.cli.options import from_arguments
from opgrip.cli.progress import Reporter, loading
from opgrip.errors import UserError
from opgrip.replay.cases.selection import Selection
from opgrip.replay.command.replay_options import ScoreOptions, make_parser
from opgrip.replay.reports import OutputOptions
from opgrip.replay.results.judgement import judged_steps
from opgrip.replay.results.results import RAN, Result, summarize
from opgrip.replay.sequences.step_options import launch_of

if TYPE_CHECKING:
    from opgrip.replay.command.trace_replay import ReplayOutcome
    from opgrip.replay.reports.outcome import Results
    from opgrip.replay.run.workload import Workload

    PrintScore = Callable[[Results, IO[str]], None]

NAMED = 4  # maximum number of traces that a message names


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    return run_command(make_parser(), partial(run, words=words), words)


def run(args: argparse.Namespace, words: Sequence[str] = ()) -> int:
    with loading("opreplay"):
        from opgrip.replay.command.replay import perform
        from opgrip.replay.command.trace_targets import targets_of
        from opgrip.replay.reports.comparison.comparison import exit_status, hold_candidates, parse_candidate_gate
        from opgrip.replay.reports.outcome import scorers

    reporter, output = Reporter("opreplay"), from_arguments(OutputOptions, args)
    gates = [parse_candidate_gate(text) for text in output.gate]
    launch, baseline_file = launch_of(), from_arguments(ScoreOptions, args).baseline
    if not args.sequence and args.shard is None and launch is not None and launch.world_size > 1:
        raise UserError(
            f"each of {launch.world_size} processes would replay all cases",
            "add --shard auto, or --sequence for a step",
        )
    is_ranks = args.sequence and launch is not None
    is_several = not is_ranks and targets_of(list(map(str, args.trace))) is not None
    if baseline_file is not None and not is_several and not is_ranks:
        raise UserError("--baseline is for several traces", "name a folder, zoo or zoo:PATTERN")
    # reject invalid requests before any case runs
    printers = [scorer.against(baseline_file) if is_several else scorer.print_scores for scorer in scorers.values()]
    again = shlex.join(["opreplay", *words, *(() if output.resume else ("--resume",))])
    outcome = perform(args, reporter, again=again, check=_check_scorers)
    if outcome is None:
        return 0
    if outcome.was_complete:
        reporter.say(f"{args.output} is complete: nothing is left to replay")
        return 0
    if output.list:
        return _print_list(outcome, reporter)
    rows = list(outcome.results)
    if outcome.step is not None:
        _print_step(outcome, args)
    elif is_several:
        _print_several(outcome, printers, reporter, from_arguments(Selection, args))
    else:
        _print_cases(outcome, printers, reporter, from_arguments(Selection, args))
    if outcome.problem is not None:
        if is_several:
            reporter.say(f"the rows are kept; continue with: {again}")
        raise outcome.problem
    if outcome.interrupted:
        _report_details(outcome, reporter)
        hint = f"continue with: {again}" if output.output else "only a replay with --output can be continued"
        reporter.say(f"{_where_interrupted(outcome, rows)}; {hint}")
        return INTERRUPTED
    _keep(outcome.results, args, reporter)
    _report_details(outcome, reporter)
    if outcome.unmatched:
        reporter.say(outcome.unmatched)
    if outcome.problems:
        names, more = list(outcome.problems)[:NAMED], len(outcome.problems) - NAMED
        listed = ", ".join([*names, *([f"{more} more"] if more > 0 else [])])
        reporter.say(f"{len(outcome.problems)} of {counted(outcome.traces, 'trace')} not replayed: {listed}")
    held = [hold_candidates(gate, judged_steps(outcome.results)) for gate in gates]
    for item in held:
        reporter.say(item.line)
    return _end(args, outcome, reporter) or exit_status(held)


def _check_scorers(workload: Workload) -> None:
    from opgrip.replay.reports.outcome import scorers

    for scorer in scorers.values():
        scorer.check(workload.trace.header)


def _print_cases(
    outcome: ReplayOutcome, printers: Sequence[PrintScore], reporter: Reporter, selection: Selection
) -> None:
    from opgrip.replay.reports.results_table import OF_THESE, print_results

    rows = list(outcome.results)
    # an analysis prints the rows of candidates with their verdicts
    if not judged_steps(rows) and (rows or not outcome.interrupted):
        print_results(rows, sys.stdout, OF_THESE if selection.selects_some else "share")
    if outcome.problem is None:
        for analysis in outcome.analyses:
            analysis.print(rows, sys.stdout)
        _print_scores(printers, outcome.results, reporter)


def _print_several(
    outcome: ReplayOutcome, printers: Sequence[PrintScore], reporter: Reporter, selection: Selection
) -> None:
    from opgrip.replay.reports.results_table import MOST_INPUTS, print_inputs, print_reasons

    rows = list(outcome.results)
    if judged_steps(rows):
        pass
    elif rows and (not selection.selects_all or len(rows) <= MOST_INPUTS):
        print_inputs(rows, sys.stdout)
        _print_scores(printers, outcome.results, reporter)
    elif rows:
        _print_scores(printers, outcome.results, reporter)
        print_reasons(rows, sys.stdout)
    for analysis in outcome.analyses:
        analysis.print(rows, sys.stdout)


def _print_scores(printers: Sequence[PrintScore], results: Results, reporter: Reporter) -> None:
    try:
        for print_score in printers:
            print_score(results, sys.stdout)
    except UserError as error:
        # the measured rows must not be lost
        reporter.say(f"no score: {error}")


def _print_step(outcome: ReplayOutcome, args: argparse.Namespace) -> None:
    from opgrip.replay.reports.step_report import ROWS, print_ranks, print_sequence
    from opgrip.replay.sequences.step_results import SequenceResult

    top = from_arguments(Selection, args).top
    if isinstance(outcome.step, SequenceResult):
        print_sequence(outcome.step, list(outcome.results), top or ROWS, sys.stdout)
    elif outcome.step is not None:
        print_ranks(outcome.step, top or ROWS, sys.stdout)


def _print_list(outcome: ReplayOutcome, reporter: Reporter) -> int:
    from opgrip.replay.reports.results_table import list_cases

    for name, cases in outcome.listed:
        if name:
            print(f"{name}:")
        list_cases(cases, sys.stdout)
    if outcome.unmatched:
        reporter.say(outcome.unmatched)
    return 0


def _report_details(outcome: ReplayOutcome, reporter: Reporter) -> None:
    for row in outcome.results if not outcome.traces and outcome.step is None else ():
        if row.detail is not None:
            reporter.say(f"{row.op} {row.mode}:\n{row.detail.rstrip()}")


def _where_interrupted(outcome: ReplayOutcome, rows: Sequence[Result]) -> str:
    if outcome.traces:
        return f"interrupted in trace {max(len({row.trace for row in rows}), 1)} of {outcome.traces}"
    return f"interrupted after {len({row.case for row in rows})} of {counted(outcome.cases, 'case')}"


def _keep(results: Results, args: argparse.Namespace, reporter: Reporter) -> None:
    from opgrip.replay.command.trace_replay import keep

    rows, output = counted(len(results), "row"), from_arguments(OutputOptions, args)
    if output.output is not None:
        reporter.say(f"wrote {rows} to {output.output}")
    if (stored_as := keep(results, output, reporter)) is not None:
        reporter.say(f"{rows} kept as {stored_as}")


def _end(args: argparse.Namespace, outcome: ReplayOutcome, reporter: Reporter) -> int:
    from opgrip.replay.reports.fulfilment import unfulfilled

    rows = list(outcome.results)
    lines = unfulfilled(args, rows)
    for line in lines:
        reporter.say(line)
    reporter.say(summarize(rows))
    if (fidelity := outcome.results.fidelity) is not None:
        reporter.say(fidelity.line)
    is_ok = all(row.status in RAN for row in rows) and not outcome.problems
    if outcome.step is not None:
        from opgrip.replay.sequences.step_results import SequenceResult

        is_ok &= not (isinstance(outcome.step, SequenceResult) and outcome.step.unsupported)
    is_broken = any(step.broken for step in judged_steps(rows))
    return 1 if lines or is_broken or (args.strict and not is_ok) else 0
