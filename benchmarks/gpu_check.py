"""Check opgrip on this machine's GPU, in steps that are compared with torch.profiler, nsys, NVML and known results.

    make gpu-check                                       # from a fresh clone: first sets up the environment
    python benchmarks/gpu_check.py                       # if torch and opgrip's dependencies are installed
    python benchmarks/gpu_check.py --seconds 1500        # all steps; without it, steps of nine minutes
    python benchmarks/gpu_check.py --only '*events*'     # some steps

It prints one line per step, `ok`, `wrong` or `not here`, and writes one file to be sent back, which its first lines
name: a .zip with check.json (verdicts, numbers, the machine), the output of each step, and small reports of nsys and
ncu. The file is replaced as a whole after each step,
and a .jsonl with its name gets each fact at once, so that the facts remain if the check is interrupted. The exit status
is 1 if a step is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from gpu import ROOT
from gpu.archive import write_archive
from gpu.environment import describe_machine, is_there
from gpu.processes import run_steps
from gpu.reports import small_reports
from gpu.step import Outcome, Place, Verdict
from gpu.steps import CHECKS
from rich.console import Console
from rich.markup import escape

# file to be sent back; OUT is the folder whose files some borrowed machines return
OUTPUT = Path(os.environ.get("OUT") or ROOT / "build", "gpu-check.zip")
MOST_S = 560.0  # time limit of all steps together, in s: borrowed machines often end a command after ten minutes
MOST_LOG_BYTES = 100_000
STYLES = {Verdict.OK: "green", Verdict.WRONG: "bold red", Verdict.NOT_HERE: "dim"}


def main() -> int:
    """Run the steps; return 1 if one is wrong."""
    args = parse_arguments()
    if not is_there(args.device):
        print(f"torch {torch.__version__} sees no {args.device}: nothing is checked")
        return 0
    steps = [step for step in CHECKS.values() if fnmatchcase(step.name, args.only)]
    console = Console(highlight=False, soft_wrap=True)
    machine = describe_machine(args.device)
    console.print(f"torch {torch.__version__}, {', '.join(gpu['name'] for gpu in machine['gpus']) or args.device}")
    console.print(f"the file to be sent back, replaced after each step: {escape(str(args.output))}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    facts = args.output.with_suffix(".jsonl")
    facts.unlink(missing_ok=True)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        place = Place(args.device, Path(name), args.top, facts)
        for outcome in run_steps(steps, place, args.seconds):
            outcomes.append(outcome)
            check = {"machine": machine, "steps": [asdict(outcome) for outcome in outcomes]}
            write_archive(args.output, texts_of(check, place.folder), small_reports(place.folder))
            told = f"{outcome.verdict.value}: {outcome.reason}" if outcome.reason else outcome.verdict.value
            style = STYLES[outcome.verdict]
            console.print(
                f"{len(outcomes):2} {escape(outcome.name)} ({outcome.seconds:.0f} s): [{style}]{escape(told)}[/]"
            )
    counts = {verdict: sum(outcome.verdict is verdict for outcome in outcomes) for verdict in Verdict}
    console.print(", ".join(f"{count} {verdict.value}" for verdict, count in counts.items()))
    console.print(f"please send back this one file: {escape(str(args.output))}")
    return 1 if counts[Verdict.WRONG] else 0


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="that is checked (default: %(default)s)")
    parser.add_argument("--top", type=int, default=20, help="cases of the shipped trace (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=MOST_S, help="time limit of all steps (default: %(default)s)")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="steps by name, such as '*nsys*'")
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT, metavar="FILE", help="the file to be sent back")
    # argparse takes a value that begins with --, like the names of some steps, for another option
    args = parser.parse_args([*_joined(sys.argv[1:])])
    args.output = args.output.resolve()
    if not any(fnmatchcase(name, args.only) for name in CHECKS):
        parser.error(f"no step is called {args.only!r}; there are: {', '.join(CHECKS)}")
    return args


def texts_of(check: Mapping[str, object], folder: Path) -> dict[str, str]:
    """Return the texts of the archive, by file name, without names of the user and the host.

    check : content of `check.json`
    folder : folder with the output of each step, as `.txt`
    """
    texts = {"check.json": without_names(json.dumps(check, indent=1, default=str))}
    for log in sorted(folder.glob("*.txt")):
        texts[f"logs/{log.name}"] = without_names(log.read_bytes()[-MOST_LOG_BYTES:].decode(errors="replace"))
    return texts


def without_names(text: str) -> str:
    """Return text without the names of the user, the host and the user's folders."""
    for name, replacement in ((str(ROOT), "ROOT"), (str(Path.home()), "~"), (platform.node(), "HOST")):
        if len(name) > 2:
            text = text.replace(name, replacement)
    return text


def _joined(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command line, with `--only` and its value joined by `=` to one word."""
    rest = iter(words)
    for word in rest:
        yield f"{word}={next(rest, '')}" if word == "--only" else word


if __name__ == "__main__":
    sys.exit(main())
