"""Check opgrip on this machine's GPU, in steps that are compared with torch.profiler, nsys, NVML and known results.

    make gpu-check                                       # from a fresh clone: first sets up the environment
    python benchmarks/gpu_check.py                       # if opgrip is installed; about ten minutes
    python benchmarks/gpu_check.py --only '*events*'     # some steps

It prints one line per step, `ok`, `wrong` or `not here`, and writes one file to be sent back, which its last line
names: a
.zip with check.json (verdicts, numbers, the machine), the output of each step, and small reports of nsys and ncu, which
tests parse elsewhere after unpacking into tests/data/gpu. The exit status is 1 if a step is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from time import perf_counter

import torch
from gpu.environment import describe_machine
from gpu.processes import run_apart
from gpu.reports import small_reports
from gpu.step import Outcome, Place, Step, Verdict
from gpu.steps import STEPS
from rich.console import Console
from rich.markup import escape

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = Path(os.path.relpath(ROOT / "build/gpu-check.zip"))
MOST_S = 1500.0
"""time limit of all steps together"""
MOST_LOG_BYTES = 100_000
STYLES = {Verdict.OK: "green", Verdict.WRONG: "bold red", Verdict.NOT_HERE: "dim"}


def main() -> int:
    """Run the steps; return 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="that is checked (default: %(default)s)")
    parser.add_argument("--top", type=int, default=20, help="cases of the shipped trace (default: %(default)s)")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="steps by name, such as '*nsys*'")
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT, metavar="FILE", help="the file to be sent back")
    args = parser.parse_args()
    if not is_there(args.device):
        print(f"torch {torch.__version__} sees no {args.device}: nothing is checked")
        return 0
    steps = [step for step in STEPS.values() if fnmatchcase(step.name, args.only)]
    if not steps:
        parser.error(f"no step is called {args.only!r}; there are: {', '.join(STEPS)}")
    console = Console(highlight=False, soft_wrap=True)
    machine = describe_machine(args.device)
    console.print(f"torch {torch.__version__}, {', '.join(gpu['name'] for gpu in machine['gpus']) or args.device}")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        folder = Path(name)
        place = Place(args.device, folder, args.top)
        outcomes = list(outcomes_of(steps, place, console, MOST_S))
        check = {"machine": machine, "steps": [asdict(outcome) for outcome in outcomes]}
        write_archive(args.output, check, folder)
    counts = {verdict: sum(outcome.verdict is verdict for outcome in outcomes) for verdict in Verdict}
    console.print(", ".join(f"{count} {verdict.value}" for verdict, count in counts.items()))
    console.print(f"please send back this one file: {escape(str(args.output))}")
    return 1 if counts[Verdict.WRONG] else 0


def is_there(device: str) -> bool:
    """Return True if torch has a device of that kind, without creating a context."""
    try:
        module = getattr(torch, torch.device(device).type)
    except (AttributeError, RuntimeError):
        return False
    return bool(module.is_available())


def outcomes_of(steps: Sequence[Step], place: Place, console: Console, most_s: float) -> Iterator[Outcome]:
    """Yield the outcome of each step, printing it; skip steps for which no time is left."""
    end = perf_counter() + most_s
    for number, step in enumerate(steps, 1):
        with console.status(f"{number} of {len(steps)}: {escape(step.name)}"):
            outcome = take(step, place, end - perf_counter())
        told = f"{outcome.verdict.value}: {outcome.reason}" if outcome.reason else outcome.verdict.value
        style = STYLES[outcome.verdict]
        console.print(f"{number:2} {escape(step.name)} ({outcome.seconds:.0f} s): [{style}]{escape(told)}[/]")
        yield outcome


def take(step: Step, place: Place, remaining_s: float) -> Outcome:
    """Run a step within the remaining time and return its outcome."""
    if step.needs_cuda and place.kind != "cuda":
        return Outcome(step.name, Verdict.NOT_HERE, step.needs_cuda)
    if remaining_s <= 0:
        return Outcome(step.name, Verdict.NOT_HERE, "no time was left for it")
    folder = place.folder / step.slug
    return run_apart(step, replace(place, folder=folder), folder.with_suffix(".txt"), remaining_s)


def write_archive(path: Path, check: Mapping[str, object], folder: Path) -> None:
    """Write the archive of check, output and reports, without names of the user and the host."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("check.json", without_names(json.dumps(check, indent=1)))
        for log in sorted(folder.glob("*.txt")):
            text = log.read_bytes()[-MOST_LOG_BYTES:].decode(errors="replace")
            archive.writestr(f"logs/{log.name}", without_names(text))
        for report in small_reports(folder):
            archive.write(report, report.name)


def without_names(text: str) -> str:
    """Return text without the names of the user, the host and the user's folders."""
    for name, replacement in ((str(ROOT), "ROOT"), (str(Path.home()), "~"), (platform.node(), "HOST")):
        if len(name) > 2:
            text = text.replace(name, replacement)
    return text


if __name__ == "__main__":
    sys.exit(main())
