"""How every command of this project starts, fails and ends."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import NoReturn

import torch

from opgrip.traces.errors import UserError
from opgrip.traces.limits import UNBOUNDED_HELP

USAGE_ERROR = 2
INTERRUPTED = 130


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and whose help keeps the layout of its text."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Say in one line what is wrong with the command line, and exit."""
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message}: see {self.prog} --help\n")


def add_debug(parser: argparse.ArgumentParser) -> None:
    """Give a command its `--debug`."""
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def add_reading(parser: argparse.ArgumentParser, partial: str) -> None:
    """Give a command that reads traces its `--partial`, which does what is said, and its `--unbounded`."""
    parser.add_argument("--partial", action="store_true", help=partial)
    parser.add_argument("--unbounded", action="store_true", help=UNBOUNDED_HELP)


def add_version(parser: argparse.ArgumentParser) -> None:
    """Give a command its `--version`."""
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the versions of opgrip and of torch")


class _ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"opgrip {metadata.version('opgrip')}, torch {torch.__version__}")
        parser.exit()


def run_command(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
) -> int:
    """Parse, run, and turn what goes wrong into one line and an exit status.

    Returns
    -------
    The command's own status; 2 after a `UserError`; 130 after Ctrl-C. A reader that closed our output early, as
    `head` does, is not an error.
    """
    args = parser.parse_args(argv)
    prog = getattr(args, "prog", parser.prog)
    try:
        status = run(args)
        sys.stdout.flush()
    except UserError as error:
        if args.debug:
            traceback.print_exc()
        print(f"{prog}: error: {printable(error)}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout again at exit, which would complain once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def printable(text: object) -> str:
    """Text that a file holds, for a terminal: what would steer it is shown as an escape."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in str(text)
    )


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def seed(text: str) -> int:
    """A seed as torch takes it."""
    try:
        number = int(text)
        torch.Generator().manual_seed(number)
    except (ValueError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 64 bits") from error
    return number


def not_negative(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)
