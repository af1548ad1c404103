"""Repeats of a replay in new processes, and a replay as one of the processes that a launcher started."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Generic, Protocol, TypeVar

from opgrip.cli.options import from_arguments
from opgrip.cli.progress import Reporter, SilentReporter
from opgrip.replay.modes import EAGER
from opgrip.replay.operators.devices import check_present, is_accelerator, use_device
from opgrip.replay.outcome import Results
from opgrip.replay.results.ratios import with_ratios
from opgrip.replay.results.repeats import join_repeats
from opgrip.replay.results.results import Result
from opgrip.replay.sequences.ranks.control import Control
from opgrip.replay.sequences.ranks.plan import own_file
from opgrip.replay.sequences.ranks.replay_ranks import StepOutcome
from opgrip.replay.sequences.step_options import RankLaunch, RankOptions


class RunsRanks(Protocol):
    """A replay whose trace is loaded."""

    def run_ranks(self, options: RankOptions, control: Control) -> tuple[StepOutcome | None, Results]:
        """Run this rank's calls with the other ranks; in the first, give what all took."""


T = TypeVar("T", bound=RunsRanks)


@dataclass(frozen=True)
class Launched(Generic[T]):
    """What the first of several ranks has of their replay."""

    whole: T
    results: Results
    outcome: StepOutcome


def replay_launched(
    args: argparse.Namespace, launch: RankLaunch, reporter: Reporter, make: Callable[[argparse.Namespace, Reporter], T]
) -> Launched[T] | None:
    """Replay a rank's part of a step, with the other ranks that were launched; None in all but the first.

    Parameters
    ----------
    make : the replay that a command line asks for; of the first rank alone it tells anything, and writes

    Raises
    ------
    UserError : as `make` does in any rank, and where a rank ends
    """
    options = from_arguments(RankOptions, args)
    with Control(launch, options.collective_timeout) as control:
        if not control.is_first:
            args.output = args.store = None
            reporter = SilentReporter("opreplay")
        whole = control.together(lambda: make(_own(args, launch), reporter))
        outcome, results = whole.run_ranks(options, control)
        return None if outcome is None else Launched(whole, results, outcome)


def _own(args: argparse.Namespace, launch: RankLaunch) -> argparse.Namespace:
    """What a command line asks of one rank: its own of several traces, and its own device."""
    if len(args.trace) > 1:
        args.trace = [own_file(args.trace, launch.rank, args.unbounded)]
    if args.device is not None and is_accelerator(args.device) and ":" not in args.device:
        args.device = f"{args.device}:{launch.local_rank}"
        check_present(args.device)
        use_device(args.device)
    return args


MOST = 20
"""Repeats of a case that is not decided."""

ByCase = dict[int, list[Result]]
RunOnce = Callable[[Collection[int], str], ByCase]
"""Replays the cases of some numbers; the text says which time it is."""


def repeat(
    first: Mapping[int, list[Result]], run_once: RunOnce, repeats: int, base: Results | None, reference: str = EAGER
) -> ByCase:
    """The rows of all cases, each of all of its repeats.

    Parameters
    ----------
    first : rows of a first replay, by the numbers of their cases
    repeats : how often every case is replayed, the first time included
    base : those of another run: cases of which it is not sure whether they differ are then repeated further
    reference : the mode that others are compared with
    """
    joined = {number: list(rows) for number, rows in first.items()}
    if not joined:
        return joined
    for time in range(2, repeats + 1):
        _add(joined, run_once(joined.keys(), f"repeat {time} of {repeats}"), reference)
    if base is None:
        return joined
    for time in count(repeats + 1):
        undecided = _undecided(base, joined)
        if not undecided or time > MOST:
            return joined
        _add(joined, run_once(undecided, f"repeat {time}"), reference)
    raise AssertionError("counting ends nowhere")


def _add(joined: ByCase, new: Mapping[int, list[Result]], reference: str) -> None:
    for number, rows in new.items():
        both = [join_repeats([before, row]) for before, row in zip(joined[number], rows, strict=True)]
        joined[number] = with_ratios(both, reference)


def _undecided(base: Results, joined: Mapping[int, list[Result]]) -> set[int]:
    from opgrip.replay.comparison import compare

    comparison = compare(base, Results([row for rows in joined.values() for row in rows], {}))
    # the base stays as it is: of a case that it ran once, no number of repeats makes sure
    return {pair.new.case for pair in comparison.pairs if pair.more_new_runs is not None}
