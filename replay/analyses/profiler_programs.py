"""Finds profilers, merges the user's options for them with opgrip's, and runs the cases once more under them."""

from __future__ import annotations

import glob
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from opgrip.cli.command import own_python
from opgrip.cli.output_files import read_input
from opgrip.errors import UserError
from opgrip.replay.cases.selection import Point, Variant
from opgrip.replay.results.results import Result
from opgrip.replay.run.request import RunRequest

Key = tuple[int, str]  # key of a row: case number, and text that distinguishes the rows of the case, such as the mode


def key_of(row: Result) -> Key:
    point = Point(row.threads, row.batch_scale, row.streams)
    return row.case, Variant(0, row.values, row.direction, row.mode, point).label


def why_unseen(own: Result | None) -> str:
    if own is None:
        return "it was not run again"
    return own.error or f"it was {own.status} and is not in the report"


LAST_LINES = 6  # number of last lines of a failed profiler to report: the first states the reason, the others the usage


def find_program(name: str, product: str, folders: Sequence[str], named: str | None = None) -> str:
    """Return the path of a profiler.

    folders : glob patterns of usual installation paths, searched after PATH
    """
    if named is not None:
        binary = shutil.which(named)
        if binary is None:
            raise UserError(
                f"{named} is not a program that can be run", f"set the path of the program {name} with --{name}-bin"
            )
        return binary
    binary = shutil.which(name) or next((path for folder in folders for path in sorted(glob.glob(folder))[::-1]), None)
    if binary is None:
        raise UserError(
            f"{name} is neither on PATH nor at {' or '.join(folders)}",
            f"install {product}, or set its path with --{name}-bin",
        )
    return binary


@dataclass(frozen=True, slots=True)
class Flags:
    """Options of a profiler that opgrip sets itself, or must know to merge the user's options with its own.

    output : option for the path of the report, such as `--output`; the user may not set it
    joined : option whose value is a list, such as `--trace`; the user's items are added to opgrip's
    """

    output: str
    joined: str
    short: Mapping[str, str]
    repeatable: Collection[str] = ()

    def read(self, words: Sequence[str], valued: Collection[str]) -> Iterator[tuple[str, str | None, list[str]]]:
        remaining = deque(words)
        while remaining:
            word = remaining.popleft()
            long, has_value, value = word.partition("=")
            name = long if long.startswith("--") else self.short.get(word[:2], "")
            if name and not long.startswith("--"):
                value = word[2:].removeprefix("=")
                has_value = value
            if not has_value and name in valued and remaining and not remaining[0].startswith("-"):
                value = remaining.popleft()
                yield name, value, [word, value]
            else:
                yield name, value or None, [word]


def arguments_in(path: Path, flags: Flags) -> list[str]:
    """Return the words of a file of profiler arguments, split as a shell does, without `#` comments."""
    try:
        words = shlex.split(read_input(path, 1 << 20, "name a file of arguments").decode(), comments=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as arguments: {error}",
            "write the arguments as on a command line, quoted as in a shell",
        ) from error
    if any(name == flags.output for name, _, _ in flags.read(words, ())):
        problem = f"{path} sets {flags.output}, which only opgrip may set"
        raise UserError(problem, "set the path of the report with opreplay's --output")
    return words


def merged_arguments(own: Sequence[str], others: Sequence[str], flags: Flags) -> list[str]:
    own_names = {word.partition("=")[0] for word in own}
    items: list[str] = []
    other_words: list[str] = []
    set_by_user = set()
    for name, value, words in flags.read(others, own_names):
        if name == flags.joined:
            items += (value or "").split(",")
        else:
            other_words += words
            set_by_user.add(name)
    merged = []
    for word in own:
        name, _, value = word.partition("=")
        if name == flags.joined:
            items = [item for item in dict.fromkeys([*value.split(","), *items]) if item not in ("", "none")]
            merged.append(f"{name}={','.join(items)}")
        elif name not in set_by_user or name in flags.repeatable:
            merged.append(word)
    return [*merged, *other_words]


def run_program(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        # import opgrip's modules, even if the user's folder contains modules of the same names
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    return "; ".join(lines[-LAST_LINES:]) or f"status {done.returncode}"


def profiled_command(folder: Path, request: RunRequest, without: Collection[int], timeout_s: float) -> list[str]:
    """Return the command that runs cases under a profiler: it starts this module, with files in `folder`."""
    limited = replace(request, limits=replace(request.limits, timeout=timeout_s))
    (folder / "work.json").write_text(json.dumps({"request": asdict(limited), "without": sorted(without)}))
    return own_python("opgrip.replay.analyses.profiler_programs", str(folder / "work.json"), str(folder / "rows.jsonl"))


def profiled_rows(folder: Path) -> list[Result]:
    path = folder / "rows.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [Result.from_plain(json.loads(line)) for line in lines]


def main(request_path: str, output: str) -> int:
    from opgrip.replay.run.worker import run_cases
    from opgrip.replay.run.workload import load_workload

    work: dict[str, Any] = json.loads(Path(request_path).read_text())
    workload = load_workload(RunRequest.from_plain(work["request"]))
    with open(output, "w", encoding="utf-8") as file:
        # in this process, because a forked one would share the connection to the profiler
        for rows in run_cases(workload, set(work["without"])):
            for row in rows:
                file.write(json.dumps(row.to_plain()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
