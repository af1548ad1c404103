"""The command `opreplay`: runs the calls of a trace again, and measures them."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING

from opgrip.cli.command import INTERRUPTED, run_command
from opgrip.cli.options import from_arguments
from opgrip.cli.plural import counted
from opgrip.cli.progress import Reporter, loading
from opgrip.errors import NothingSelectedError, UserError
from opgrip.replay.replay_options import Output, ScoreOptions, make_parser
from opgrip.replay.results.results import RAN, summarize
from opgrip.replay.sequences.step_options import RankLaunch, launch_of

if TYPE_CHECKING:
    from opgrip.replay.command.replay import Replay
    from opgrip.replay.command.several.targets import Target
    from opgrip.replay.outcome import Results
    from opgrip.replay.results.results import Result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `opreplay --help`."""
    words = sys.argv[1:] if argv is None else list(argv)
    return run_command(make_parser(), lambda args: run(args, words), words)


def run(args: argparse.Namespace, words: Sequence[str] = ()) -> int:
    """Load the trace, replay its cases, print the tables.

    Parameters
    ----------
    words : the command line, to be told again with what goes on where it was interrupted
    """
    with loading("opreplay"):
        from opgrip.replay.command.replay import Replay
        from opgrip.replay.command.several.targets import targets_of
        from opgrip.replay.outputs import is_completed
        from opgrip.replay.workers.engines.local_processes import start_engine
        from opgrip.replay.workers.shards import settle_shard

    reporter = Reporter("opreplay")
    settle_shard(args)
    output = from_arguments(Output, args)
    is_done = is_completed(output)
    if args.sequence and (launch := launch_of()) is not None:
        return _replay_ranks(args, launch, reporter)
    if args.shard is None and (launch := launch_of()) is not None and launch.world_size > 1:
        raise UserError(
            f"each of {launch.world_size} processes would replay the same", "add --shard auto, or --sequence for a step"
        )
    targets = targets_of(list(map(str, args.trace)))
    if targets is not None:
        return _replay_several(args, targets, output, words, reporter)
    if from_arguments(ScoreOptions, args).baseline is not None:
        raise UserError("--baseline is for several traces", "name a folder, zoo or zoo:PATTERN")
    with start_engine(args) as engine:
        return _replay_one(Replay(args, reporter, engine=engine), args, is_done, words, reporter)


def _replay_one(
    replay: Replay, args: argparse.Namespace, is_done: bool, words: Sequence[str], reporter: Reporter
) -> int:
    """Replay one trace, and print its table."""
    from opgrip.replay.command.scorers import scorers
    from opgrip.replay.reports.results_table import list_cases, print_results

    output = replay.output
    if is_done:
        replay.completed_rows()
        reporter.say(f"{output.output} is whole: there is nothing to go on with")
        return 0
    if output.list:
        list_cases(replay.loaded.cases, sys.stdout)
        return 0
    if replay.is_sequence:
        return _replay_sequence(replay, args, reporter)
    # what is refused is refused before it runs
    for scorer in scorers.values():
        scorer.check(replay.loaded.trace.header)
    again = shlex.join(["opreplay", *words, *(() if output.resume else ("--resume",))])
    try:
        replayed = replay.run()
    except UserError:
        _say_what_is_stored(replay, again, reporter)
        raise
    rows = list(replayed.results)
    if rows or not replayed.interrupted:
        print_results(rows, sys.stdout)
    if replayed.problem is not None:
        _say_what_is_stored(replay, again, reporter)
        raise replayed.problem
    for analysis in replayed.analyses:
        analysis.print(rows, sys.stdout)
    for scorer in scorers.values():
        _print_score(scorer.print_scores, replayed.results, reporter)
    if not replayed.interrupted:
        _say_where(replay, replayed.results, reporter)
    for row in rows:
        if row.detail is not None:
            reporter.say(f"{row.op} {row.mode}:\n{row.detail.rstrip()}")
    if replayed.interrupted:
        hint = f"go on with: {again}" if output.output else "with --output it could go on"
        ran, all_cases = len({row.case for row in rows}), len(replay.loaded.cases)
        reporter.say(f"interrupted after {ran} of {counted(all_cases, 'case')}; {hint}")
        return INTERRUPTED
    return _end(args, rows, reporter)


def _end(args: argparse.Namespace, rows: Sequence[Result], reporter: Reporter, is_ok: bool = True) -> int:
    """Say which requests no row fulfilled, and what came of all rows; return the exit status."""
    from opgrip.replay.reports.fulfilment import unfulfilled

    lines = unfulfilled(args, rows)
    for line in lines:
        reporter.say(line)
    reporter.say(summarize(list(rows)))
    is_ok = is_ok and all(row.status in RAN for row in rows)
    return 1 if lines or (args.strict and not is_ok) else 0


def _print_score(print_score: Callable[[Results, IO[str]], None], results: Results, reporter: Reporter) -> None:
    """Print a score, or why there is none: an error here must not lose rows that took hours."""
    try:
        print_score(results, sys.stdout)
    except UserError as error:
        reporter.say(f"no score: {error}")


def _say_where(replay: Replay, results: Results, reporter: Reporter) -> None:
    """Keep the results, and say where they are."""
    rows = counted(len(results), "row")
    if replay.output.output is not None:
        reporter.say(f"{rows} to {replay.output.output}")
    if (kept := replay.keep(results)) is not None:
        reporter.say(f"{rows} kept as {kept}")


def _replay_several(
    args: argparse.Namespace, targets: Sequence[Target], output: Output, words: Sequence[str], reporter: Reporter
) -> int:
    """Replay several traces in turn, and print a line for each model and the score."""
    from opgrip.replay.command.replay import keep, several_replays
    from opgrip.replay.command.scorers import scorers
    from opgrip.replay.outputs import is_completed
    from opgrip.replay.reports.results_table import print_reasons
    from opgrip.replay.workers.engines.local_processes import start_engine

    baseline = from_arguments(ScoreOptions, args).baseline
    printers = [scorer.against(baseline) for scorer in scorers.values()]
    if is_completed(output):
        reporter.say(f"{output.output} is whole: there is nothing to go on with")
        return 0
    if output.list:
        return _list_several(args, targets, reporter)
    again = shlex.join(["opreplay", *words, *(() if output.resume else ("--resume",))])
    with start_engine(args) as engine:
        outcome = several_replays(args, targets, reporter, engine).run()
    rows = list(outcome.results)
    if rows:
        for print_score in printers:
            _print_score(print_score, outcome.results, reporter)
        print_reasons(rows, sys.stdout)
    for analysis in outcome.analyses:
        analysis.print(rows, sys.stdout)
    if outcome.problem is not None:
        reporter.say(f"the rows are kept; go on with: {again}")
        raise outcome.problem
    if outcome.interrupted:
        hint = f"go on with: {again}" if output.output else "with --output it could go on"
        ran = len({row.trace for row in rows})
        reporter.say(f"interrupted in trace {max(ran, 1)} of {len(targets)}; {hint}")
        return INTERRUPTED
    if output.output is not None:
        reporter.say(f"{counted(len(rows), 'row')} to {output.output}")
    if (kept := keep(outcome.results, output, reporter)) is not None:
        reporter.say(f"{counted(len(rows), 'row')} kept as {kept}")
    if outcome.unmatched:
        reporter.say(outcome.unmatched)
    if outcome.problems:
        of_all = counted(len(targets), "trace")
        reporter.say(f"{len(outcome.problems)} of {of_all} not replayed: {', '.join(outcome.problems)}")
    return _end(args, rows, reporter, is_ok=not outcome.problems)


def _list_several(args: argparse.Namespace, targets: Sequence[Target], reporter: Reporter) -> int:
    from opgrip.replay.command.replay import Replay
    from opgrip.replay.command.several.run import Unmatched
    from opgrip.replay.command.several.targets import args_of_one
    from opgrip.replay.reports.results_table import list_cases

    unmatched = Unmatched(len(targets))
    for target in targets:
        try:
            loaded = Replay(args_of_one(args, target), reporter, origin=target.origin).loaded
        except NothingSelectedError as error:
            unmatched.add(error)
            continue
        except UserError as error:
            reporter.say(f"{target.origin.trace}: {error}")
            continue
        print(f"{target.origin.trace}:")
        list_cases(loaded.cases, sys.stdout)
    if unmatched.are_all:
        raise unmatched.error()
    if line := unmatched.line():
        reporter.say(line)
    return 0


def _say_what_is_stored(replay: Replay, again: str, reporter: Reporter) -> None:
    """Say what a replay that failed left, and how to go on with it."""
    from opgrip.replay.workers.journal import journal_path

    if replay.output.output is not None and replay.stored_cases:
        cases = f"{replay.stored_cases} of {counted(len(replay.loaded.cases), 'case')}"
        reporter.say(f"{cases} are in {journal_path(replay.output.output)}; go on with: {again}")


def _replay_sequence(replay: Replay, args: argparse.Namespace, reporter: Reporter) -> int:
    from opgrip.replay.reports.sequence import ROWS, print_sequence

    results, result = replay.run_sequence()
    rows = list(results)
    print_sequence(result, rows, replay.job.selection.top or ROWS, sys.stdout)
    _say_where(replay, results, reporter)
    return _end(args, rows, reporter, is_ok=not result.unsupported)


def _replay_ranks(args: argparse.Namespace, launch: RankLaunch, reporter: Reporter) -> int:
    """Replay a step with other ranks; the first prints."""
    from opgrip.replay.command.replay import replay_with_ranks
    from opgrip.replay.reports.ranks import ROWS, print_ranks

    launched = replay_with_ranks(args, launch, reporter)
    if launched is None:
        return 0
    print_ranks(launched.outcome, launched.whole.job.selection.top or ROWS, sys.stdout)
    _say_where(launched.whole, launched.results, reporter)
    return _end(args, list(launched.results), reporter)
