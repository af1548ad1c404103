"""Runs a user's script or module in this process, as `python` would."""

from __future__ import annotations

import builtins
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType

from opgrip.traces.errors import UserError


def script_name(arguments: Sequence[str]) -> str:
    """The name of what is run, fit for a file's.

    Parameters
    ----------
    arguments : what follows `python`: a file or `-m` and a module, then its own arguments

    Raises
    ------
    UserError : where they name nothing that can be run
    """
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        return arguments[1].rpartition(".")[2]
    if not arguments or arguments[0].startswith("-"):
        raise UserError("nothing to run follows --", "name a script, or -m and a module, then its own arguments")
    if not Path(arguments[0]).exists():
        raise UserError(f"{arguments[0]} is not there", "name a script, or -m and a module")
    return Path(arguments[0]).stem


def run_script(arguments: Sequence[str], compiled: Callable[[bytes, str], CodeType] | None = None) -> int:
    """Run it, and give the exit status that `python` would have ended with; an error's traceback goes to stderr.

    Parameters
    ----------
    compiled : makes the code of a script of its source and its file's name; None for Python's own way
    """
    before = list(sys.argv), list(sys.path)
    try:
        if arguments[0] == "-m":
            sys.argv[:] = arguments[1:]
            sys.path.insert(0, "")
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = arguments
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            _run_file(arguments[0], compiled)
    except SystemExit as error:
        return _status(error.code)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _print_own_frames(error)
        return 1
    finally:
        _wait_for_threads()
        sys.argv[:], sys.path[:] = before
    return 0


def _run_file(file: str, compiled: Callable[[bytes, str], CodeType] | None) -> None:
    if compiled is None or not Path(file).is_file():
        runpy.run_path(file, run_name="__main__")
        return
    code = compiled(Path(file).read_bytes(), file)
    before, module = sys.modules["__main__"], ModuleType("__main__")
    vars(module).update(__file__=file, __builtins__=builtins)
    sys.modules["__main__"] = module
    try:
        exec(code, vars(module))
    finally:
        sys.modules["__main__"] = before


def _wait_for_threads() -> None:
    """As `python` does at its end, which first tells pools of threads, whose threads else wait for work for ever."""
    hooks: list[Callable[[], None]] = getattr(threading, "_threading_atexits", [])
    while hooks:
        with suppress(Exception):
            hooks.pop()()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()


def _status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def _print_own_frames(error: BaseException) -> None:
    """The traceback without the frames that ran the script."""
    frames, own = error.__traceback__, (__file__, runpy.run_path.__code__.co_filename)
    while frames is not None and frames.tb_frame.f_code.co_filename in own:
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)
