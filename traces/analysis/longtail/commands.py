"""Command that grips a function: the program of its trace, run again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

ALONE = ("-f", "--force", "--find-longtail")
VALUED = ("-o", "--output", "--top", "--bandwidth", "--max-calls", "--max-bytes")
"""Options of the recorded command that concern its trace: without and with a value."""


def pattern_of(header: Mapping[str, Any], file: str, function: str) -> str:
    """Return the pattern `module:qualname` of a function for `--grip`."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".").strip(".")
    if is_script(file, header):
        module = "__main__"
    return f"{module}:{function.replace('.<locals>', '')}"


def grip_command(header: Mapping[str, Any], pattern: str) -> str:
    """Return the `opcapture` command of a trace, or for the script that recorded it, with `--grip` and the pattern."""
    own, program = _parts(header)
    return shlex.join(["opcapture", *_run_options(own), "--grip", pattern, *(["--", *program] if program else [])])


def _parts(header: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the options of `opcapture` in a trace's command, and the script with its arguments."""
    command = header.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    if not words or words[0] != "opcapture":
        return [], words
    place = words.index("--") if "--" in words else len(words)
    return words[1:place], words[place + 1 :]


def is_script(file: str, header: Mapping[str, Any]) -> bool:
    """Return True if a file is what the trace's command runs, which is `__main__` for Python."""
    own, program = _parts(header)
    match program:
        case ["-m", module, *_]:
            return PurePath(file).as_posix().endswith(f"{module.replace('.', '/')}.py")
        case [script, *_]:
            # a script that captured itself is recorded by its last name alone
            return PurePath(file) == PurePath(script) or (not own and PurePath(file).name == script)
    return False


def _run_options(options: Sequence[str]) -> list[str]:
    """Return the options that say what to run."""
    run_options: list[str] = []
    pending = iter(options)
    for word in pending:
        name, value, _ = word.partition("=")
        if name in VALUED and not value:
            next(pending, None)
        elif name not in (*ALONE, *VALUED):
            run_options.append(word)
    return run_options
