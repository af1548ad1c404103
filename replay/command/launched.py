"""A replay as one of several processes that a launcher such as torchrun started: each takes a rank's part of a step."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from opgrip.cli.options import from_arguments
from opgrip.cli.progress import Reporter, SilentReporter
from opgrip.replay.operators.devices import check_present, is_accelerator, use_device
from opgrip.replay.outcome import Results
from opgrip.replay.sequences.ranks.control import Control
from opgrip.replay.sequences.ranks.launch import Launch
from opgrip.replay.sequences.ranks.options import RankOptions
from opgrip.replay.sequences.ranks.part import own_file
from opgrip.replay.sequences.ranks.replay import StepOutcome


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
    args: argparse.Namespace, launch: Launch, reporter: Reporter, make: Callable[[argparse.Namespace, Reporter], T]
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


def _own(args: argparse.Namespace, launch: Launch) -> argparse.Namespace:
    """What a command line asks of one rank: its own of several traces, and its own device."""
    if len(args.trace) > 1:
        args.trace = [own_file(args.trace, launch.rank, args.unbounded)]
    if args.device is not None and is_accelerator(args.device) and ":" not in args.device:
        args.device = f"{args.device}:{launch.local_rank}"
        check_present(args.device)
        use_device(args.device)
    return args
