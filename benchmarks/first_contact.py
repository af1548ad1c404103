"""Measure opgrip on a GPU that is available for minutes: what is worth most first, each fact on disk at once.

    python benchmarks/first_contact.py                                    # the first plan, under five minutes
    python benchmarks/first_contact.py second --out DIR --seconds 450
    python benchmarks/first_contact.py third --out DIR                    # why captured steps take longer
    python benchmarks/first_contact.py first --out DIR --only clocks,bert

Nothing is judged. DIR receives facts.jsonl, a line for each fact, and raw.zip with traces, rows, kernel tables and the
output of each step, which is replaced as a whole after each step. A later plan reuses the traces in DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from gpu import ROOT
from gpu.archive import write_archive
from gpu.environment import is_there
from gpu.processes import run_steps
from gpu.step import Outcome, Place, Verdict, note_facts
from gpu.steps import PLANS

# folder for facts and files, below OUT, the folder whose files some borrowed machines return
OUT = Path(os.environ.get("OUT") or ROOT / "build", "first-contact")
SECONDS = {"first": 285.0, "second": 450.0, "third": 130.0}
MOST_CHARACTERS = 400  # longest printed fact


def main() -> int:
    """Run the steps of a plan; return 0, or 1 if no step ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", choices=PLANS, nargs="?", default="first", help="the steps to run")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="folder for facts and files")
    parser.add_argument(
        "--seconds",
        type=float,
        help="time limit (default: 285 for the first plan, 450 for the second, 130 for the third)",
    )
    parser.add_argument("--device", default="cuda", help="device to measure (default: %(default)s)")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        metavar="STEP,...",
        help="steps by name, its first or its second part",
    )
    parser.add_argument("--small", action="store_true", help="small models and few cases, as in tests")
    args = parser.parse_args()
    steps = [step for step in PLANS[args.plan] if not args.only or {step.name, *step.name.split(":")} & {*args.only}]
    if not steps:
        parser.error(f"no step of {args.only}; there are: {', '.join(step.name for step in PLANS[args.plan])}")
    if not is_there(args.device):
        print(f"torch sees no {args.device}: nothing is measured")
        return 0
    out = args.out.resolve()
    folder = out / "steps"
    (folder / "kept").mkdir(parents=True, exist_ok=True)
    place = Place(args.device, folder, 0, out / "facts.jsonl", is_small=args.small)
    for outcome in run_steps(steps, place, SECONDS[args.plan] if args.seconds is None else args.seconds):
        note_facts(place.facts, outcome.name, _ending(outcome))
        write_archive(out / "raw.zip", {}, [*sorted((folder / "kept").iterdir()), *sorted(folder.glob("*.txt"))])
        print(
            f"{outcome.name}: {json.dumps(outcome.facts | _ending(outcome), default=str)[:MOST_CHARACTERS]}", flush=True
        )
    return 0


def _ending(outcome: Outcome) -> dict[str, object]:
    """Return how a step ended: its status, duration in s and error, or the reason why it did not run."""
    if outcome.verdict is Verdict.NOT_HERE:
        return {"skipped": outcome.reason}
    status = 0 if outcome.verdict is Verdict.OK else 1
    return {"status": status, "seconds": round(outcome.seconds, 1)} | ({"error": outcome.reason} if status else {})


if __name__ == "__main__":
    sys.exit(main())
