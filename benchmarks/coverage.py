"""Check capture and replay on many models: each config folder of mmdet and mmseg, each architecture of transformers.

Each model is built with random weights, runs one step natively, one under an independent mode that counts operators,
one captured, one audited by torch's own record functions, and its trace is replayed. Compared are the bits of results
and of the model's state, the operators one by one, and the cases that are ok. Each trial is a separate process. All of
them take some hours; finished trials are kept in a file that ships and are not repeated: empty it to try all again.
Some models need more than `make openmmlab` installs: pip install lap motmetrics scikit-learn fairscale.

    python benchmarks/coverage.py [--library mmdet] [--name 'dino*'] [--write docs/coverage.md]
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import multiprocessing
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any

from covering.subjects import LIBRARIES, RUNS, Subject, subjects
from covering.table import page, print_summary
from covering.trial import SAID, STAGES, run_in_process, told
from rich.console import Console

from opgrip.errors import UserError

# each trial is forked from a process that has loaded the packages, which saves a third of its time
PROCESSES = multiprocessing.get_context("forkserver")
LOADED = {"mmdet": ("mmdet.models", "mmdet.testing"), "mmseg": ("mmseg.models",), "transformers": ("transformers",)}
# outcome of each trial, as it ships: docs/coverage.md is generated from it
JOURNAL = Path(__file__).parent / "covering" / "outcomes.jsonl"
# number of models in each library, as the page reports
AVAILABLE = Path(__file__).parent / "covering" / "available.json"
TIMEOUT_S = 900
TOO_LONG = "it takes more than"
ENDED = "the process ended"  # reason for a trial that ended before all of its stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", action="append", choices=LIBRARIES, help="default: all that are installed")
    parser.add_argument("--name", default="*", help="only configs' folders, or architectures, of such names")
    parser.add_argument("--run", choices=RUNS, help="default: all")
    parser.add_argument("--journal", type=Path, default=JOURNAL, help="default: %(default)s")
    parser.add_argument("--again", action="store_true", help="try again what was not whole")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time, of a thread each (default: %(default)s)")
    parser.add_argument("--timeout", type=int, default=TIMEOUT_S, help="seconds a trial (default: %(default)s)")
    parser.add_argument("--write", type=Path, help="the page that the table is written to")
    args = parser.parse_args()
    outcomes = read_journal(args.journal)
    candidates = list(subjects(tuple(args.library or LIBRARIES)))
    selected = [
        subject
        for subject in candidates
        if fnmatch.fnmatch(subject.name, args.name) and args.run in (None, subject.run)
    ]
    # sums on one thread are reproducible
    os.environ["OMP_NUM_THREADS"] = "1"
    PROCESSES.set_forkserver_preload(
        ["covering.trial", *(LOADED[args.library[0]] if len(args.library or ()) == 1 else ())]
    )
    console = Console(stderr=True)
    remaining = [
        item for item in selected if item.key not in outcomes or (args.again and "failed" in outcomes[item.key])
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        trials = [pool.submit(attempt, subject, args.timeout) for subject in remaining]
        for number, trial in enumerate(as_completed(trials), 1):
            outcome = trial.result()
            append(args.journal, outcome)
            reason = f"{outcome['failed']}: {outcome['reason']}" if "failed" in outcome else "replayed"
            name = f"{outcome['library']}/{outcome['name']} {outcome['run']}"
            console.print(f"{number}/{len(remaining)} {name}: {reason}", highlight=False, markup=False)
    outcomes = read_journal(args.journal)
    chosen = [outcomes[subject.key] for subject in selected if subject.key in outcomes]
    print_summary(chosen)
    if args.write is not None:
        available = json.loads(AVAILABLE.read_text()) | count_models(candidates)
        AVAILABLE.write_text(json.dumps(available, indent=1) + "\n")
        args.write.write_text(page(list(outcomes.values()), available), encoding="utf-8")


def count_models(candidates: list[Subject]) -> dict[str, dict[str, Any]]:
    """Return, by library, its version and its number of different models among the `candidates`."""
    names = {library: {item.name for item in candidates if item.library == library} for library in LIBRARIES}
    return {
        library: {"version": importlib.import_module(library).__version__, "models": len(models)}
        for library, models in names.items()
        if models
    }


def attempt(subject: Subject, timeout: int) -> dict[str, Any]:
    """Return the outcome for the first config and setting that runs natively, or the most informative failure."""
    names = {"library": subject.library, "name": subject.name, "run": subject.run}
    failures: list[dict[str, Any]] = []
    unbuilt: set[str] = set()
    for about in subject.attempts():
        model = about["model"]
        if model in unbuilt:
            continue
        outcome = run_trial(about, timeout)
        settings = {name: about[name] for name in ("size", "batch_size") if name in about}
        came = {**names, "model": Path(model).name, **settings, **outcome}
        if outcome.get("failed") != "native":
            return came
        if not is_built(outcome):
            # with any config and setting
            unbuilt.add(model)
        failures.append(came)
    return {**most_telling(failures), "attempts": len(failures), "reasons": distinct_reasons(failures)}


def is_built(outcome: dict[str, Any]) -> bool:
    """Return True if a model that failed natively could be built."""
    return not outcome["reason"].startswith(UserError.__name__)


def most_telling(failures: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the failure with the last setting, which is the config's own image size, of the first config that can be
    built.

    A failure by the time limit is only returned if the config has no other.
    """
    built = [failure for failure in failures if is_built(failure)] or failures
    of_config = [failure for failure in built if failure["model"] == built[0]["model"]]
    return ([failure for failure in of_config if not failure["reason"].startswith(TOO_LONG)] or of_config)[-1]


def distinct_reasons(failures: list[dict[str, Any]]) -> dict[str, str]:
    """Return each different reason of the failures, by the config and the image sizes with which it first occurred."""
    names_by_reason: dict[str, str] = {}
    for failure in failures:
        images = " x ".join(str(failure[name]) for name in ("batch_size", "size") if failure.get(name))
        names_by_reason.setdefault(failure["reason"], f"{failure['model']} {images}".rstrip())
    return {name: reason for reason, name in names_by_reason.items()}


def run_trial(about: dict[str, Any], timeout: int) -> dict[str, Any]:
    """Run a trial in a process; return the results of its stages, and the stage that failed or did not end, if any.

    about : description of the trial, as from `Subject.attempts`
    timeout : time limit in s
    """
    with tempfile.TemporaryDirectory() as folder:
        answers, questions = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=run_in_process, args=(about, folder, questions))
        process.start()
        questions.close()
        try:
            outcome, reason = receive(answers, timeout)
            if reason == ENDED:
                process.join()
                said = Path(folder) / SAID
                # a process that ended before it could report has written no file
                text = said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""
                lines = text.splitlines() or [""]
                reason = f"{ENDED} with status {process.exitcode}: {told(lines[-1])}"
        finally:
            process.kill()
            process.join()
    stage = running_stage(outcome)
    return outcome if stage is None else {**outcome, "failed": stage, "reason": reason}


def receive(answers: Connection, timeout: int) -> tuple[dict[str, Any], str]:
    """Return the stages that a trial reported, and why the others are missing; empty if it reported all.

    answers : connection from the trial's process
    timeout : time limit in s
    """
    outcome: dict[str, Any] = {}
    deadline = monotonic() + timeout
    with suppress(EOFError, OSError):
        while running_stage(outcome) is not None:
            if not answers.poll(max(0.0, deadline - monotonic())):
                return outcome, f"{TOO_LONG} {timeout} s"
            outcome |= answers.recv()
        return outcome, ""
    return outcome, ENDED


def running_stage(outcome: dict[str, Any]) -> str | None:
    """Return the first stage of a trial that has no result yet; None if a stage failed or all have results."""
    return None if "failed" in outcome else next((stage for stage in STAGES if stage not in outcome), None)


def read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last outcome of each model and run."""
    items = [json.loads(line) for line in whole_lines(path)]
    return {f"{item['library']}/{item['name']} {item['run']}": item for item in items}


def append(path: Path, outcome: dict[str, Any]) -> None:
    """Append an outcome, replacing an incomplete last line of a killed run."""
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.truncate(sum(map(len, whole_lines(path))))
        file.write(json.dumps(outcome).encode() + b"\n")


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a journal without an incomplete last one."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith(b"\n")]


if __name__ == "__main__":
    main()
