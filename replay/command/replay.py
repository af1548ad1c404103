"""The Python function `replay()`, and the choice of the kind of replay that a command line requests.

There are four kinds: the cases of one trace, several traces one after the other, all calls of a step in order, and a
step on several ranks.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from opgrip.cli.options import arguments_of, from_arguments
from opgrip.cli.progress import QuietReporter, Reporter, SilentReporter
from opgrip.errors import NothingSelectedError, UserError, in_words_of_python
from opgrip.replay.command.several_traces import SeveralReplays, Unmatched
from opgrip.replay.command.trace_replay import ReplayOutcome, TraceReplay, keep
from opgrip.replay.command.trace_targets import TraceTarget, args_of_one, targets_of
from opgrip.replay.operators.devices import check_present, is_accelerator, use_device
from opgrip.replay.outcome import Results, check_output, is_completed, read_run
from opgrip.replay.replay_options import OutputOptions, make_parser, words_of
from opgrip.replay.reports.fulfilment import unfulfilled
from opgrip.replay.results.origins import Origin
from opgrip.replay.run.request import settle_shard
from opgrip.replay.run.workload import Workload
from opgrip.replay.sequences.step_options import RankLaunch, RankOptions, launch_of
from opgrip.replay.workers.executors import Executor, LocalExecutor, start_executor


def replay(trace: str | Path | Sequence[str | Path] | Mapping[str, Any] | None = None, **options: Any) -> Results:
    """Replay the calls of a trace, or samples, as `opreplay` does.

    ::

        results = replay("traces/faster_rcnn.jsonl", mode=["eager", "jit"], top=20, device="cpu")
        results.frame

    Cases run in a separate process, so that a case that crashes, hangs or takes too much memory does not affect other
    cases. That process imports the main module again, so scripts must call this under `if __name__ == "__main__":`.

    trace : a file that `Capture` or `opcapture` wrote; several files, a folder of them, `zoo` or `zoo:PATTERN`, which
        are replayed in turn; `samples`, `sample:NAME`, or a folder that `grip` wrote; the contents of a PARAM
        configuration file as a dictionary; None if `operator` names what to replay
    options : long names of options in `opreplay --help`, with `_` for `-`; a list for options that take several values;
        `inputs` is a dictionary or a list of dictionaries

    Raises TypeError if an option is unknown.

    Raises UserError if the value of an option is invalid, options contradict each other, or a file cannot be read
    or written.
    """
    if isinstance(trace, Mapping):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "configuration.json")
            path.write_text(json.dumps(trace), encoding="utf-8")
            results = replay(path, **options)
            return replace(results, header={**results.header, "trace": path.name})
    with in_words_of_python():
        args = arguments_of(make_parser(), words_of(trace), options, excluded=("strict", "list"))
        results = replay_arguments(args)
    for line in unfulfilled(args, results.rows):
        warnings.warn(line, stacklevel=2)
    return results


def replay_arguments(args: argparse.Namespace, executor: Executor | None = None) -> Results:
    """Run the replay that a parsed `opreplay` command line requests; ranks other than the first return no rows.

    Raises `UserError` if the replay fails, and KeyboardInterrupt if it is interrupted.

    executor : runs the cases; None for the one that the command line names
    """
    reporter = QuietReporter("opgrip")
    outcome = perform(args, reporter, may_fork=False, executor=executor)
    if outcome is None:
        return Results([], {})
    if outcome.problem is not None:
        raise outcome.problem
    if outcome.interrupted:
        raise KeyboardInterrupt
    output = from_arguments(OutputOptions, args)
    if outcome.was_complete and outcome.traces and output.output is not None:
        return read_run(output.output)
    if output.store is not None and not outcome.was_complete:
        keep(outcome.results, output, reporter)
    return outcome.results


def perform(
    args: argparse.Namespace,
    reporter: Reporter,
    may_fork: bool = True,
    again: str = "",
    check: Callable[[Workload], object] = lambda workload: None,
    executor: Executor | None = None,
) -> ReplayOutcome | None:
    """Run the replay that a command line requests, and return its results and how it ended.

    Ranks other than the first return None. Raises `UserError` if the replay cannot run.

    may_fork : True if this process has not used torch yet, so that it can be forked
    again : command that resumes an interrupted replay, for messages; empty for no such message
    check : function that raises `UserError` if the workload must not be replayed
    executor : runs the cases; None for the one that the command line names
    """
    settle_shard(args)
    output = from_arguments(OutputOptions, args)
    is_complete = is_completed(output)
    if args.sequence and (launch := launch_of()) is not None:
        return _replay_ranks(args, launch, reporter)
    targets = targets_of(list(map(str, args.trace)))
    if targets is not None and is_complete:
        return ReplayOutcome(Results([], {}), was_complete=True, traces=len(targets))
    with start_executor(args) if executor is None else nullcontext(executor) as executor:
        if targets is not None:
            run = _list_several if output.list else _replay_several
            return run(args, targets, reporter, executor)
        one = TraceReplay(args, reporter, executor, may_fork, again=again)
        if is_complete:
            rows = one.completed_rows()
            return ReplayOutcome(Results(rows, {"trace": one.workload.request.trace}), was_complete=True)
        if output.list:
            return ReplayOutcome(Results([], {}), listed=[("", one.workload.cases)])
        if args.sequence:
            return one.run_sequence()
        check(one.workload)
        return one.run()


def _replay_several(
    args: argparse.Namespace, targets: Sequence[TraceTarget], reporter: Reporter, executor: Executor
) -> ReplayOutcome:
    check_output(from_arguments(OutputOptions, args), args)

    def make(one: argparse.Namespace, origin: Origin) -> TraceReplay:
        return TraceReplay(one, reporter, executor, origin=origin)

    return SeveralReplays(args, targets, reporter, make, executor.runs_here).run()


def _list_several(
    args: argparse.Namespace, targets: Sequence[TraceTarget], reporter: Reporter, executor: Executor
) -> ReplayOutcome:
    unmatched, listed = Unmatched(len(targets)), []
    for target in targets:
        try:
            one = TraceReplay(args_of_one(args, target), reporter, executor, origin=target.origin)
        except NothingSelectedError as error:
            unmatched.add(error)
            continue
        except UserError as error:
            reporter.say(f"{target.origin.trace}: {error}")
            continue
        listed.append((target.origin.trace, one.workload.cases))
    if unmatched.are_all:
        raise unmatched.error()
    return ReplayOutcome(Results([], {}), listed=listed, unmatched=unmatched.line())


def _replay_ranks(args: argparse.Namespace, launch: RankLaunch, reporter: Reporter) -> ReplayOutcome | None:
    from opgrip.replay.sequences.ranks.control import Control

    options = from_arguments(RankOptions, args)
    with Control(launch, options.collective_timeout) as control:
        if not control.is_first:
            args.output = args.store = None
            reporter = SilentReporter("opreplay")
        own = control.together(lambda: TraceReplay(_args_of_rank(args, launch), reporter, LocalExecutor(), False))
        return own.run_ranks(options, control)


def _args_of_rank(args: argparse.Namespace, launch: RankLaunch) -> argparse.Namespace:
    own = copy(args)
    if len(own.trace) > 1:
        from opgrip.replay.sequences.ranks.plan import own_file

        own.trace = [own_file(own.trace, launch.rank, own.unbounded)]
    if own.device is not None and is_accelerator(own.device) and ":" not in own.device:
        own.device = f"{own.device}:{launch.local_rank}"
        check_present(own.device)
        use_device(own.device)
    return own
