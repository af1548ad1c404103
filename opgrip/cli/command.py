"""How each command starts, fails and ends, and the words of its messages."""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from importlib import metadata
from typing import Any, NoReturn

from opgrip.errors import UserError

NAMES = ("stdin", "stdout", "stderr")


def open_closed_streams() -> None:
    """Let what is closed be empty, and take all that is written: else the next file to be opened took its place."""
    for number, name in enumerate(NAMES):
        if getattr(sys, name) is None:
            file = os.open(os.devnull, os.O_RDWR)
            if file != number:
                os.dup2(file, number)
                os.close(file)
            stream = open(number, "w" if number else "r", encoding="utf-8", errors="replace")  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


UNBOUNDED_HELP = "read traces without limits on memory and nesting"

USAGE_ERROR = 2
INTERRUPTED = 130
LIMIT = 1 << 63
"""Bound of whole numbers that options take."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
"""Numbers of errors where a device takes no more."""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and whose help keeps the layout of its text.

    Parameters
    ----------
    surplus : what to do about an argument too many; empty where there is nothing to say
    """

    def __init__(self, *args: object, surplus: str = "", **kwargs: object) -> None:
        self._surplus = surplus
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; an argument that is not known is an error of the command or verb that it was given to.

        Files may stand before options and after them, where a command takes several.
        """
        namespace, unknown = super().parse_known_args(args, namespace)
        several = next((action for action in self._get_positional_actions() if action.nargs in {"*", "+"}), None)
        for argument in unknown:
            if several is None or argument.startswith("-"):
                self._refuse(argument)
            value = several.type(argument) if callable(several.type) else argument
            setattr(namespace, several.dest, [*getattr(namespace, several.dest), value])
        return namespace, []

    def _refuse(self, argument: str) -> NoReturn:
        if argument.startswith("-") and argument != "-":
            flag = argument.partition("=")[0]
            options = {option.lstrip("-"): option for option in self._option_string_actions if option.startswith("--")}
            hint = did_you_mean(flag.lstrip("-"), options, form="--{}")
            self.error(f"there is no option {flag}{f': {hint}' if hint else ''}")
        self.error(f"{argument!r} is one argument too many{f': {self._surplus}' if self._surplus else ''}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = list(map(str, action.choices))
            hint = did_you_mean(str(value), names, f"choose from {', '.join(names)}")
            raise argparse.ArgumentError(action, f"{value!r} is no choice: {hint}")

    def error(self, message: str) -> NoReturn:
        """Say in one line what is wrong with the command line, and exit."""
        end = "" if message.endswith("?") else ":"
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message}{end} see {self.prog} --help\n")


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
        print(f"opgrip {metadata.version('opgrip')}, torch {metadata.version('torch')}")
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
    open_closed_streams()
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
        _leave_stdout()
        return 0
    except SystemExit as error:
        # rich ends the process where nobody reads
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        _leave_stdout()
        return 0
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _leave_stdout()
        print(f"{prog}: error: the output cannot be written: {(error.strerror or '').lower()}", file=sys.stderr)
        return USAGE_ERROR
    return status


def _leave_stdout() -> None:
    """Let what Python flushes at its exit go nowhere: it would complain once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(text: object) -> str:
    """Text that a file holds, for a terminal: what would steer it is shown as an escape."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in str(text)
    )


def positive(text: str) -> int:
    """A whole number from 1, of 64 bits."""
    return _whole(text, 1)


def seed(text: str) -> int:
    """A seed as torch takes it."""
    match = re.fullmatch(r"\s*[-+]?\d+\s*", text)
    if match is None or not -(1 << 63) <= int(text) < 1 << 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 64 bits")
    return int(text)


def part_of_one(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def not_negative(text: str) -> int:
    """A whole number from 0, of 64 bits."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    digits = text.lstrip("0") or text[-1:]
    # before int, which refuses thousands of digits in words of its own
    if digits.isdecimal() and (len(digits) > len(str(LIMIT)) or int(digits) >= LIMIT):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is too large")
    if not text.isdecimal() or int(digits) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
    return int(digits)


MOST = 3
NEAR = 0.8
WILD = "*?[]"


def did_you_mean(word: str, names: Collection[str], otherwise: str = "", form: str = "{}") -> str:
    """`did you mean x or y?` of the names that are much like a word, each in a form; `otherwise` where none is.

    Those that are alike by less than `NEAR` of the nearest are none that was meant.
    """
    lower = {name.lower(): name for name in names}
    close = get_close_matches(word.lower(), lower, MOST, 0.6)
    ratios = [SequenceMatcher(None, name, word.lower()).ratio() for name in close]
    close = [form.format(lower[name]) for name, ratio in zip(close, ratios, strict=True) if ratio >= NEAR * ratios[0]]
    return f"did you mean {listed(close)}?" if close else otherwise


def listed(names: Sequence[str]) -> str:
    """`x, y or z`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def nearest(pattern: str, names: Iterable[str], most: int = MOST) -> list[str]:
    """The names that a pattern with wildcards comes nearest to, the nearest first."""
    word = pattern.lower().strip(WILD)
    return sorted(names, key=lambda name: (-_likeness(word, name.lower()), name))[:most]


def _likeness(word: str, name: str) -> float:
    """How much of a word is in the beginning of a name, or of the part of it after a dot."""
    starts = [0, *(place + 1 for place, character in enumerate(name) if character in ".:/")]
    return max(SequenceMatcher(None, word, name[start : start + len(word)]).ratio() for start in starts)


# `python -m` would import from the folder that it is started in, where a stranger's files may lie
_START = (
    f"import sys; sys.path[:] = sys.argv.pop(1).split({os.pathsep!r}); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def own_python(module: str, *args: str) -> list[str]:
    """A command that runs a module as `python -m` does, and finds modules where this process finds them.

    Parameters
    ----------
    args : what the module gets as `sys.argv[1:]`
    """
    return [sys.executable, "-c", _START, os.pathsep.join(sys.path), module, *args]


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A number and what it counts: `1 case`, `1,200 cases`.

    Parameters
    ----------
    plural : of the noun, where that is not the noun and an `s`
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


STEP = "opgrip step"
"""How the labels of the steps of a recording begin that was asked for."""
DEVICE_TIME = "times are of the device for calls that worked on one"
"""What is said above times that are not all of the host."""
