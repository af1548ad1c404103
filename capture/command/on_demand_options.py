"""The options of `opcapture --on-demand`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from opgrip.cli.option_types import byte_count, interval
from opgrip.cli.options import flag_of, option, options_in, titled
from opgrip.errors import UserError


@titled("recordings of a program that goes on")
@dataclass(frozen=True, slots=True)
class OnDemand:
    """How a program is recorded when somebody asks for it."""

    on_demand: bool = option(
        False, "run the script at full speed, and record its steps when `opcapture trigger` or a signal asks for it"
    )
    step_module: str | None = option(
        None,
        "a step is an outermost call of a module of such a class (default: what the program says by "
        "opgrip.capture.step(), else a call of any module, else an optimizer's step)",
        metavar="PATTERN",
    )
    seconds: float | None = option(
        None, "record the steps that begin in so much time, instead of --steps", parse=interval, metavar="TIME"
    )
    signal: str | None = option(None, "a signal that asks for a recording, such as USR1", metavar="NAME")
    every: float | None = option(None, "record by itself so often, such as every 10min", parse=interval, metavar="TIME")
    new_only: bool = option(
        False,
        "of the recordings of --every, keep those that call what the service has not called before, and a small file a "
        "day that counts all: NAME-HOST-DATE.shapes.json, for `opgrip trace diff`",
    )
    max_disk: int | None = option(
        None,
        "what the recordings of --every take at most, such as 2GB: the oldest leave",
        parse=byte_count,
        metavar="SIZE",
    )


def check_on_demand(args: argparse.Namespace) -> None:
    """Raise `UserError` for an option of recordings that are asked for, without `--on-demand`."""
    if args.on_demand:
        return
    for _, word, default, _ in options_in(OnDemand):
        if getattr(args, word) != default:
            raise UserError(f"{flag_of(word)} is for programs that go on", "add --on-demand")
