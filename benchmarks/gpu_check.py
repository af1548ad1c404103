"""Whether opgrip is right on this machine's GPU: steps, judged by torch.profiler, nsys, NVML and known results.

    make gpu-check                                       # from a fresh clone: sets up what it needs first
    python benchmarks/gpu_check.py                       # where opgrip is installed; about ten minutes
    python benchmarks/gpu_check.py --only '*events*'     # some steps

It prints a line a step, `ok`, `wrong` or `not here`, and leaves one file to be sent back, which its last line names: a
.zip with check.json (verdicts, numbers, the machine), what each step printed, and small reports of nsys and ncu, which
tests parse elsewhere once they are unpacked into tests/data/gpu. The exit status is 1 where a step is wrong.
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
"""Of all steps together."""
MOST_LOG_BYTES = 100_000
STYLES = {Verdict.OK: "green", Verdict.WRONG: "bold red", Verdict.NOT_HERE: "dim"}


def main() -> int:
    """Take the steps, and say by the status whether none is wrong."""
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
    """Whether torch has a device of that kind; makes no context."""
    try:
        module = getattr(torch, torch.device(device).type)
    except (AttributeError, RuntimeError):
        return False
    return bool(module.is_available())


def outcomes_of(steps: Sequence[Step], place: Place, console: Console, most_s: float) -> Iterator[Outcome]:
    """Of each step, told as it comes; those for which no time is left are not taken."""
    end = perf_counter() + most_s
    for number, step in enumerate(steps, 1):
        with console.status(f"{number} of {len(steps)}: {escape(step.name)}"):
            outcome = take(step, place, end - perf_counter())
        told = f"{outcome.verdict.value}: {outcome.reason}" if outcome.reason else outcome.verdict.value
        style = STYLES[outcome.verdict]
        console.print(f"{number:2} {escape(step.name)} ({outcome.seconds:.0f} s): [{style}]{escape(told)}[/]")
        yield outcome


def take(step: Step, place: Place, remaining_s: float) -> Outcome:
    """The outcome of a step, for which there is so much time."""
    if step.needs_cuda and place.kind != "cuda":
        return Outcome(step.name, Verdict.NOT_HERE, step.needs_cuda)
    if remaining_s <= 0:
        return Outcome(step.name, Verdict.NOT_HERE, "no time was left for it")
    folder = place.folder / step.slug
    return run_apart(step, replace(place, folder=folder), folder.with_suffix(".txt"), remaining_s)


def write_archive(path: Path, check: Mapping[str, object], folder: Path) -> None:
    """The one file: the check, what steps printed, reports; names of the user and the host are taken out of texts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("check.json", without_names(json.dumps(check, indent=1)))
        for log in sorted(folder.glob("*.txt")):
            text = log.read_bytes()[-MOST_LOG_BYTES:].decode(errors="replace")
            archive.writestr(f"logs/{log.name}", without_names(text))
        for report in small_reports(folder):
            archive.write(report, report.name)


def without_names(text: str) -> str:
    """A text without where the user's files are, and who and what host it is."""
    for name, replacement in ((str(ROOT), "ROOT"), (str(Path.home()), "~"), (platform.node(), "HOST")):
        if len(name) > 2:
            text = text.replace(name, replacement)
    return text


if __name__ == "__main__":
    sys.exit(main())
