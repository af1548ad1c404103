"""User errors, format errors, and functions that distinguish a program's exceptions from faults of a hook."""

from __future__ import annotations

import dis
import functools
import itertools
import queue
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any

# bytecode instructions that raise no errors themselves, but at which Python checks for signals and thread exceptions
_CHECKS = frozenset({"RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE"})
# prefixes of bytecode instructions after which Python makes these checks, and which can also raise errors themselves
_CHECKS_AFTER = ("CALL", "PRECALL", "POP_JUMP", "YIELD")
# exceptions that C functions raise without arguments
_WITHOUT_ARGUMENTS = (StopIteration, StopAsyncIteration, MemoryError, queue.Empty)
# pattern of file paths that belong to libraries and not to the user
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|/opgrip/|^<")
# pattern of the message that Python raises if it cannot create the exception that a thread set
_NOT_MADE = re.compile(r"_PyErr_SetObject: exception |.*\.__init__\(\) missing ", re.DOTALL)


def raise_if_from_program(error: BaseException) -> None:
    """Raise a caught exception again if it is meant for the program (see `is_from_program`)."""
    if is_from_program(error):
        raise error


def is_from_program(error: BaseException) -> bool:
    """Return True if an exception is meant for the program, such as one that a signal handler raised."""
    if not isinstance(error, Exception):
        return True
    entries = list(_entries(error.__traceback__))
    for outer, inner in itertools.pairwise(entries):
        # such an instruction calls nothing
        if _instruction(outer) in _CHECKS or _interrupts(inner.tb_frame, outer.tb_frame):
            return True
    return bool(entries) and _is_set_by_thread(error, entries[-1])


def interrupted_by(error: BaseException) -> str:
    # leave out the message, since the program's own code may create it
    return f"interrupted by {type(error).__name__}"


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _interrupts(frame: FrameType, interrupted: FrameType) -> bool:
    # Python itself calls signal handlers, trace functions and callbacks of `sys.monitoring`; the first two receive the
    # interrupted frame as an argument, the last its code object
    for value in list(frame.f_locals.values()):
        if value is interrupted or value is interrupted.f_code:
            return True
        if type(value) is tuple and any(item is interrupted for item in value):
            return True
    # a handler may have deleted its arguments
    is_own = str(frame.f_globals.get("__name__")).startswith("opgrip.")
    return not is_own and frame.f_code in {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial | MethodType):
        handler = handler.func if isinstance(handler, functools.partial) else handler.__func__
    if callable(handler) and not isinstance(handler, FunctionType):
        handler = type(handler).__call__
    return handler.__code__ if isinstance(handler, FunctionType) else None


def _is_set_by_thread(error: Exception, raised_at: TracebackType) -> bool:
    # `PyThreadState_SetAsyncExc` creates the exception from its class without arguments, at one of a few instructions
    instruction = _instruction(raised_at)
    if instruction in _CHECKS:
        return True
    if not instruction.startswith(_CHECKS_AFTER):
        return False
    if type(error) in (SystemError, TypeError) and error.args and _NOT_MADE.match(str(error.args[0])):
        return True
    # a constructor of the program may set arguments
    without_arguments = not error.args or isinstance(type(error).__init__, FunctionType)
    return without_arguments and not isinstance(error, _WITHOUT_ARGUMENTS)


def _instruction(entry: TracebackType) -> str:
    # a frame that has not started is at its first check
    return dis.opname[entry.tb_frame.f_code.co_code[entry.tb_lasti]] if entry.tb_lasti >= 0 else "RESUME"


SWITCHES = ("append", "force", "partial", "resume")  # flags without a value that error messages recommend


class UserError(Exception):
    """An error that the user can correct; commands print problem and remedy as one line and exit with status 2."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.problem}: {self.hint}" if self.hint else self.problem
        return " ".join(text.split())


class NothingSelectedError(UserError):
    advice = ""


class MissingFileError(UserError, FileNotFoundError):
    pass


class ExistingFileError(UserError, FileExistsError):
    pass


@contextmanager
def in_words_of_python() -> Iterator[None]:
    """Name options in the message of a `UserError` as Python keywords: `dry_run=True` for `--dry-run`."""
    try:
        yield
    except UserError as error:
        error.problem, error.hint = map(_with_keywords, (error.problem, error.hint))
        raise


def _with_keywords(text: str) -> str:
    # JSON values, which need quotes in a shell
    text = re.sub(r"(--[a-z][a-z-]*) '(\{.*?\})'", r"\1\2", text)
    # commands keep their options
    words = r"(\bop(?:capture|replay|grip) [^;,]*)|--([a-z][a-z-]*)"
    return re.sub(words, lambda word: word[1] or _keyword(word[2].replace("-", "_")), text)


def _keyword(word: str) -> str:
    return f"{word}=True" if word in SWITCHES else f"{word}="


class FormatError(ValueError):
    pass


def one_line(error: BaseException, most: int = 200) -> str:
    try:
        text = shortened(_without_values(error), most)
    except Exception as fault:
        raise_if_from_program(fault)
        text = "its message cannot be read"
    return f"{type(error).__name__}: {text}"


# a tensor or an array whose elements are in the text
_VALUES = re.compile(r"\b(tensor|array)\((?=\[|-?[\d.]|True|False|nan|inf)(?:[^()]|\([^()]*\))*\)?")


def _without_values(error: BaseException) -> str:
    return _VALUES.sub(r"\1(...)", " ".join(str(error).split()))


def shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    start = text[: most - 3]
    return f"{start.rpartition(' ')[0] or start} ..."


MOST = 1000  # maximum number of characters of an unknown error's message


def place_of(error: BaseException) -> str:
    """Return ` at FILE:LINE` for the innermost line of an error in the user's code."""
    files = [(entry.tb_frame.f_code.co_filename, entry.tb_lineno) for entry in _entries(error.__traceback__)]
    own = [(name, line) for name, line in files if name.endswith(".py") and not _LIBRARY.search(name)]
    return f" at {own[-1][0].rpartition('/')[2]}:{own[-1][1]}" if own else ""


def cause_of(error: BaseException, most: int = MOST) -> str:
    """Return the cause of an error on one line, in short words for common errors such as lack of memory."""
    try:
        text = _without_values(error)
    except Exception:
        return one_line(error)
    if isinstance(error, UserError):
        return text
    if isinstance(error, MemoryError):
        return f"out of memory: {shortened(text, most)}" if text else "out of memory"
    for pattern, say in _CAUSES:
        match = pattern.search(text)
        if match is not None:
            return match.expand(say) if isinstance(say, str) else say(match)
    return one_line(error, most)


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} PB"


def _driver(match: re.Match[str]) -> str:
    version = int(match[1])
    return f"the NVIDIA driver is too old for this torch: it supports CUDA {version // 1000}.{version % 1000 // 10}"


_CAUSES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), say)
    for pattern, say in (
        (
            r"can't allocate memory: you tried to allocate (\d+) bytes",
            lambda match: f"out of memory: {_size(int(match[1]))} were requested",
        ),
        (
            r"out of memory.*?allocate ([\d.]+ \w+)\..*capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free",
            r"out of memory: \1 were requested, and \3 of \2 on the GPU are free",
        ),
        (r"out of memory|can't allocate memory", "out of memory"),
        (r"driver on your system is too old \(found version (\d+)\)", _driver),
        (r"Found no NVIDIA driver", "no NVIDIA driver is installed"),
        (r"No CUDA GPUs are available", "no GPU is visible"),
        (r"invalid device ordinal", "this machine has fewer GPUs"),
        (r"Torch not compiled with (\w+) enabled", r"this torch is built without \1"),
        (r"Could not run '([\w:.]+)' with arguments from the '(\w+)' backend", r"\1 has no kernel for \2"),
        (r"No module named 'torch\.(\w+)'", lambda match: f"this torch is built without {match[1].upper()}"),
        # leave out the rest, which describes how to debug CUDA
        (r"(CUDA error: .*?) CUDA kernel errors might be", r"\1"),
    )
)
