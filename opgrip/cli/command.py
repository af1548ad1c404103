"""Start, end and exit status of a command, and the wording of its messages."""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import partial
from importlib import metadata
from itertools import count
from typing import Any, NoReturn

from opgrip.errors import UserError

# what a function that parses the value of an option raises
InvalidValueError = argparse.ArgumentTypeError

NAMES = ("stdin", "stdout", "stderr")


def open_closed_streams() -> None:
    """Open the null device for each closed standard stream, so that no other file gets its descriptor."""
    for number, name in enumerate(NAMES):
        if getattr(sys, name) is None:
            file = os.open(os.devnull, os.O_RDWR)
            if file != number:
                os.dup2(file, number)
                os.close(file)
            stream = open(number, "w" if number else "r", encoding="utf-8", errors="replace")  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


UNBOUNDED_HELP = "read traces without the limits on memory and nesting that protect against damaged and malicious files"

USAGE_ERROR = 2
INTERRUPTED = 130
LIMIT = 1 << 63  # upper limit of integer options
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)  # error numbers of a device that accepts no more output


class OneLineParser(argparse.ArgumentParser):
    """Parser of arguments whose errors are one line, and whose help keeps the line breaks of description and epilog."""

    def __init__(self, *args: object, surplus: str = "", **kwargs: object) -> None:
        self._surplus = surplus
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
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
            self.error(f"unknown option {flag}{f': {hint}' if hint else ''}")
        self.error(f"unexpected argument: {argument!r}{f': {self._surplus}' if self._surplus else ''}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = list(map(str, action.choices))
            hint = did_you_mean(str(value), names, f"choose from {', '.join(names)}")
            raise argparse.ArgumentError(action, f"invalid choice {value!r}: {hint}")

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith("?") else ":"
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message}{end} see {self.prog} --help\n")


class ShortHelp(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str, hidden: Collection[str] = ()) -> None:
        super().__init__(prog)
        self._hidden = hidden

    def add_argument(self, action: argparse.Action) -> None:
        if action.dest not in self._hidden:
            super().add_argument(action)


def add_help_all(parser: argparse.ArgumentParser, hidden: Collection[str]) -> None:
    """Leave the options named in `hidden` out of a command's `--help`, and add `--help-all`, which shows them."""
    parser.formatter_class = partial(ShortHelp, hidden=frozenset(hidden))
    parser.add_argument("--help-all", action=_ShowAll, nargs=0, help=f"show all options ({len(hidden)} more) and exit")


class _ShowAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.print_help()
        parser.exit()


def add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--partial", action="store_true", help="use the intact part of a cut or damaged trace instead of refusing it"
    )
    parser.add_argument("--unbounded", action="store_true", help=UNBOUNDED_HELP)


def add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the versions of opgrip and of torch")


class _ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"opgrip {metadata.version('opgrip')}, torch {metadata.version('torch')}")
        parser.exit()


def run_command(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], argv: Sequence[str] | None
) -> int:
    """Parse a command's arguments, call `run` with them, and return the exit status of the process."""
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
        # rich exits the process on a broken pipe
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
    # when Python flushes stdout at exit, it would report the write error a second time
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(text: object) -> str:
    """Return text with unprintable characters as escapes, so that it cannot control a terminal."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in str(text)
    )


def positive(text: str) -> int:
    return _whole(text, 1)


def seed(text: str) -> int:
    match = re.fullmatch(r"\s*[-+]?\d+\s*", text)
    if match is None or not -(1 << 63) <= int(text) < 1 << 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a 64-bit integer")
    return int(text)


def part_of_one(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def not_negative(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    digits = text.lstrip("0") or text[-1:]
    # check before calling int, whose error for thousands of digits is unclear
    if digits.isdecimal() and (len(digits) > len(str(LIMIT)) or int(digits) >= LIMIT):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is too large")
    if not text.isdecimal() or int(digits) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
    return int(digits)


MOST = 3
NEAR = 0.8
WILD = "*?[]"


def unique_name(name: str, used_names: Container[str]) -> str:
    names = (name if number == 1 else f"{name} ({number})" for number in count(1))
    return next(candidate for candidate in names if candidate not in used_names)


def did_you_mean(word: str, names: Collection[str], otherwise: str = "", form: str = "{}") -> str:
    """Return the hint `did you mean x or y?` with names like a mistyped word, or `otherwise` if there are none."""
    lower = {name.lower(): name for name in names}
    close = get_close_matches(word.lower(), lower, MOST, 0.6)
    ratios = [SequenceMatcher(None, name, word.lower()).ratio() for name in close]
    close = [form.format(lower[name]) for name, ratio in zip(close, ratios, strict=True) if ratio >= NEAR * ratios[0]]
    return f"did you mean {listed(close)}?" if close else otherwise


def listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def nearest(pattern: str, names: Iterable[str], most: int = MOST) -> list[str]:
    word = pattern.lower().strip(WILD)
    return sorted(names, key=lambda name: (-_likeness(word, name.lower()), name))[:most]


def _likeness(word: str, name: str) -> float:
    starts = [0, *(place + 1 for place, character in enumerate(name) if character in ".:/")]
    return max(SequenceMatcher(None, word, name[start : start + len(word)]).ratio() for start in starts)


# `python -m` would import from the current folder, which may contain untrusted files
_START = (
    f"import sys; sys.path[:] = sys.argv.pop(1).split({os.pathsep!r}); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def own_python(module: str, *args: str) -> list[str]:
    """Return a command that runs a module like `python -m`, with this process's interpreter and module search path."""
    return [sys.executable, "-c", _START, os.pathsep.join(sys.path), module, *args]


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number followed by its noun, in the singular or plural: `1 case`, `1,200 cases`."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


STEP = "opgrip step"  # prefix of the profiler labels that mark steps for a capture on demand
# note printed above tables whose times include device time
DEVICE_TIME = "times are device times for calls that ran on a device"
