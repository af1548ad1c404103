"""The command that grips a function: the program of its trace, run again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

ALONE = ("-f", "--force", "--find-longtail")
VALUED = ("-o", "--output", "--top", "--bandwidth", "--max-calls", "--max-bytes")
"""Options of the recorded command that are of its trace: without a value, and with one."""


def pattern_of(file: str, function: str) -> str:
    """What `--grip` calls a function, by the file and the qualified name that a trace has: `module:qualname`."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".").strip(".")
    return f"{module}:{function.replace('.<locals>', '')}"


def grip_command(header: Mapping[str, Any], pattern: str) -> str:
    """`opcapture` as it was run for a trace, or of the script that was, with `--grip` and the pattern."""
    command = header.get("command")
    words = [str(word) for word in command] if isinstance(command, list) and command else ["opcapture"]
    own, program = words[1:], []
    if words[0] != "opcapture":
        own, program = [], ["--", *words]
    elif "--" in own:
        place = own.index("--")
        own, program = own[:place], own[place:]
    return shlex.join(["opcapture", *_kept(own), "--grip", pattern, *program])


def _kept(options: Sequence[str]) -> list[str]:
    """The options that say what runs."""
    kept: list[str] = []
    pending = iter(options)
    for word in pending:
        name, given, _ = word.partition("=")
        if name in VALUED and not given:
            next(pending, None)
        elif name not in (*ALONE, *VALUED):
            kept.append(word)
    return kept
