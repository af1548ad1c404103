"""Run each step in a separate process, so that a crash, a hang or a broken device costs one step.

python -m gpu.processes NAME DEVICE FOLDER TOP     # run a step in a folder that receives its outcome
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

from gpu.step import NotHereError, Outcome, Place, Step, Verdict, WrongError
from opgrip.platform.sandbox import run_program

BENCHMARKS = Path(__file__).resolve().parents[1]
OUTCOME = "outcome.json"
MOST_CHARACTERS = 300
"""longest reason, in characters"""


def run_apart(step: Step, place: Place, log: Path, most_s: float) -> Outcome:
    """Run a step in a separate process with its output in a file.

    Parameters
    ----------
    place : its folder belongs to the step
    most_s : time limit, regardless of the step's own
    """
    place.folder.mkdir(parents=True, exist_ok=True)
    paths = [str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    words = [step.name, place.device, str(place.folder), str(place.top)]
    timeout_s = min(step.timeout_s, most_s)
    start = perf_counter()
    with log.open("wb") as file:
        status = run_program([sys.executable, "-m", "gpu.processes", *words], timeout_s, variables, file).status
    seconds = perf_counter() - start
    if status is None:
        return Outcome(step.name, Verdict.WRONG, f"it exceeded the limit of {timeout_s:.0f} s", {}, seconds)
    kept = place.folder / OUTCOME
    if not kept.exists():
        ending = f"signal {-status}" if status < 0 else f"status {status}"
        return Outcome(step.name, Verdict.WRONG, f"its process ended with {ending}: {_last_line(log)}", {}, seconds)
    plain = json.loads(kept.read_text(encoding="utf-8"))
    return Outcome(step.name, Verdict(plain["verdict"]), plain["reason"], plain["facts"], seconds)


def outcome_of(step: Step, place: Place) -> Outcome:
    """Run a step in this process."""
    try:
        return Outcome(step.name, Verdict.OK, facts=step.run(place))
    except NotHereError as error:
        return Outcome(step.name, Verdict.NOT_HERE, str(error))
    except WrongError as error:
        return Outcome(step.name, Verdict.WRONG, str(error)[:MOST_CHARACTERS])
    except Exception as error:
        traceback.print_exc()
        last = (str(error).strip().splitlines() or [""])[-1]
        return Outcome(step.name, Verdict.WRONG, f"{type(error).__name__}: {last}"[:MOST_CHARACTERS])


def main(steps: Mapping[str, Step], name: str, device: str, folder: str, top: str) -> None:
    """Run a step, and write its outcome into the folder."""
    place = Place(device, Path(folder), int(top))
    outcome = outcome_of(steps[name], place)
    (place.folder / OUTCOME).write_text(json.dumps(asdict(outcome)), encoding="utf-8")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:MOST_CHARACTERS] if lines else "it said nothing"


if __name__ == "__main__":
    from gpu.steps import STEPS

    main(STEPS, *sys.argv[1:])
