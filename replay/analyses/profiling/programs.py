"""Profilers as programs: where they are, what else they are told, what they say last."""

from __future__ import annotations

import glob
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from opgrip.traces.errors import UserError


def find_program(name: str, product: str, places: Sequence[str], named: str | None = None) -> str:
    """The path of a profiler.

    Parameters
    ----------
    product : what is to be installed
    places : globs where installers put it, beside the folders of PATH
    named : by the user, with the option `--NAME-bin`

    Raises
    ------
    UserError : where there is none
    """
    if named is not None:
        binary = shutil.which(named)
        if binary is None:
            raise UserError(f"{named} is no program that can be run", f"name {name} itself with --{name}-bin")
        return binary
    binary = shutil.which(name) or next((path for place in places for path in sorted(glob.glob(place))[::-1]), None)
    if binary is None:
        raise UserError(
            f"{name} is neither on PATH nor at {' or '.join(places)}",
            f"install {product}, or say where it is with --{name}-bin",
        )
    return binary


def arguments_in(path: Path) -> list[str]:
    """The words of a file of arguments, as a shell reads them; lines from # on are comments.

    Raises
    ------
    UserError : where it cannot be read
    """
    try:
        return shlex.split(path.read_text(encoding="utf-8"), comments=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} holds no arguments: {error}", "write them as on a command line") from error


def run_program(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a profiler to its end, which itself runs Python.

    Raises
    ------
    OSError : where it cannot be started
    """
    return subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        # ours, where the user's folders hold modules of the same names
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """What a program said last, or its status where it said nothing."""
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"status {done.returncode}"
