"""Execution of a user's script or module in this process, as `python` would run it."""

from __future__ import annotations

import builtins
import re
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import sleep
from types import CodeType, ModuleType, TracebackType
from typing import Any

from opgrip.capture.program.processes import rank
from opgrip.cli.command import did_you_mean
from opgrip.errors import MissingFileError, UserError, one_line

# time in seconds for threads of process groups to release tensors, which needs the interpreter lock;
# DistributedDataParallel holds it while it joins them, so without this pause both can wait for ever (torch 2.13)
FOR_GROUPS_S = 0.1


def check_script(arguments: Sequence[str]) -> None:
    """Raise `UserError` unless the arguments name a module, or a script that exists."""
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        return
    if not arguments or arguments[0].startswith("-"):
        raise UserError("no script follows --", ("name a script, or -m and a module, followed by its own arguments"))
    if re.fullmatch(r"python[\d.]*", Path(arguments[0]).name) and not arguments[0].endswith(".py"):
        raise UserError(f"opcapture starts {arguments[0]} itself", f"name the script without {arguments[0]}")
    if not Path(arguments[0]).exists():
        others = [str(path) for path in Path(arguments[0]).parent.glob("*.py")]
        hint = did_you_mean(arguments[0], others, "name a script, or -m and a module")
        raise MissingFileError(f"{arguments[0]} does not exist", hint)


def script_name(arguments: Sequence[str]) -> str:
    return arguments[1].rpartition(".")[2] if arguments[0] == "-m" else Path(arguments[0]).stem


def run_script(
    arguments: Sequence[str],
    compiled: Callable[[bytes, str], CodeType] | None = None,
    ended_in: Callable[[BaseException], None] = lambda error: None,
) -> int:
    """Run a script or module, and return the exit status that `python` would have.

    arguments : the arguments that `python` would get: a file, or `-m` and a module, then the script's arguments
    compiled : function that takes the source and the path of a script file and returns its code; None for Python's own
        `compile`
    """
    before = list(sys.argv), list(sys.path)
    # keeps the script's objects, or the error whose frames hold them, alive as long as the script's threads
    outcome: object = None
    try:
        if arguments[0] == "-m":
            sys.argv[:] = arguments[1:]
            sys.path.insert(0, "")
            outcome = runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = arguments
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            outcome = _run_file(arguments[0], compiled)
    except SystemExit as error:
        outcome = error
        ended_in(error)
        return _status(error.code)
    except KeyboardInterrupt as error:
        # the command itself reports an interrupt, unless the script wants to
        if sys.excepthook is not sys.__excepthook__:
            _report(error, _own_frames(error))
        raise
    except BaseException as error:
        frames = _own_frames(error)
        if frames is None:
            name = " ".join(arguments[:2]) if arguments[0] == "-m" else arguments[0]
            reason = str(error) if isinstance(error, ImportError) else one_line(error)
            raise UserError(f"{name} cannot start", reason) from error
        outcome = error
        ended_in(error)
        return _report(error, frames)
    finally:
        _wait_for_threads()
        del outcome
        sys.argv[:], sys.path[:] = before
    return 0


def _run_file(file: str, compiled: Callable[[bytes, str], CodeType] | None) -> dict[str, Any]:
    if compiled is None or not Path(file).is_file():
        return runpy.run_path(file, run_name="__main__")
    try:
        code = compiled(Path(file).read_bytes(), file)
    except SyntaxError as error:
        # exclude the frames of the compiler from the script's traceback
        raise error.with_traceback(None) from None
    before, module = sys.modules["__main__"], ModuleType("__main__")
    vars(module).update(__file__=file, __builtins__=builtins)
    sys.modules["__main__"] = module
    try:
        exec(code, vars(module))
    finally:
        sys.modules["__main__"] = before
    return vars(module)


def _wait_for_threads() -> None:
    hooks: list[Callable[[], None]] = getattr(threading, "_threading_atexits", [])
    while hooks:
        with suppress(Exception):
            hooks.pop()()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    if rank() is not None:
        sleep(FOR_GROUPS_S)


def _status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def _report(error: BaseException, frames: TracebackType | None) -> int:
    error = error.with_traceback(frames)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
    try:
        sys.excepthook(type(error), error, frames)
    except SystemExit as ending:
        return _status(ending.code)
    except BaseException as failure:
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(failure), failure, failure.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, frames)
    return 1


def _own_frames(error: BaseException) -> TracebackType | None:
    frames, runners = error.__traceback__, (__file__, runpy.run_path.__code__.co_filename, "<frozen importlib")
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(runners):
        frames = frames.tb_next
    return frames
