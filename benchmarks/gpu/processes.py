"""Run steps one after another, each in its own process, so that a crash, a hang or a broken device costs one step.

python -m gpu.processes NAME PLACE     # run a step once a line comes from stdin; PLACE is a JSON object
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from time import monotonic, sleep

from gpu import BENCHMARKS, ROOT
from gpu.step import NotHereError, Outcome, Place, Step, Verdict, WrongError, read_facts
from opgrip.platform.sandbox import end_with_parent, kill_group

OUTCOME = "outcome.json"
MOST_CHARACTERS = 300  # longest reason, in characters
SMALL_PATIENCE = 5  # factor of a step's time limit in tests, which may run on a busy machine without a GPU
CORES_TO_IMPORT = 4  # number of cores from which the next step's imports do not disturb the step that runs
STACKS_EVERY_S, FRAMES = 12.0, 12  # time between the stacks of a step in its output, and functions of each
HOLD = "import sys, torch; torch.zeros(1, device=sys.argv[1]); sys.stdin.read()"


class StepProcess:
    """Process of a step, which imports what it needs and then waits until it may begin."""

    def __init__(self, step: Step, place: Place, log: Path) -> None:
        place.folder.mkdir(parents=True, exist_ok=True)
        # of an earlier run into the same folder
        (place.folder / OUTCOME).unlink(missing_ok=True)
        self._step, self._place, self._log = step, place, log
        words = {**asdict(place), "folder": str(place.folder), "facts": str(place.facts)}
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gpu.processes", step.name, json.dumps(words)],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                # opgrip is found on the path, not in the current folder
                cwd=place.folder,
                env=os.environ | {"PYTHONPATH": _python_path(), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    def run(self, most_s: float) -> Outcome:
        """Begin the step, end it at its time limit or after `most_s`, and return its outcome."""
        timeout_s = self._step.timeout_s * (SMALL_PATIENCE if self._place.is_small else 1)
        timeout_s, start, status = min(timeout_s, most_s), monotonic(), None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(b"begin\n")
            self._process.stdin.flush()
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(timeout_s)
        self.end()
        verdict, reason = self._verdict(status, timeout_s)
        facts = read_facts(self._place.facts, self._step.name)
        return Outcome(self._step.name, verdict, reason, facts, monotonic() - start)

    def end(self) -> None:
        """End the process and its child processes."""
        kill_group(self._process.pid)
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _verdict(self, status: int | None, timeout_s: float) -> tuple[Verdict, str]:
        if status is None:
            return Verdict.WRONG, f"it exceeded the limit of {timeout_s:.0f} s"
        kept = self._place.folder / OUTCOME
        if not kept.exists():
            ending = f"signal {-status}" if status < 0 else f"status {status}"
            return Verdict.WRONG, f"its process ended with {ending}: {_last_line(self._log)}"
        plain = json.loads(kept.read_text(encoding="utf-8"))
        return Verdict(plain["verdict"]), plain["reason"]


def run_steps(
    steps: Sequence[Step], place: Place, most_s: float, imports_ahead: bool | None = None
) -> Iterator[Outcome]:
    """Yield the outcome of each step.

    place : device and files; each step gets a folder in its folder, with the output in a `.txt` next to it
    most_s : time limit of all steps together, after which the others are not started
    imports_ahead : True if the next step's process imports modules while a step runs; None to let the number of cores
        decide
    """
    end = monotonic() + most_s
    if imports_ahead is None:
        imports_ahead = len(os.sched_getaffinity(0)) >= CORES_TO_IMPORT

    def start(step: Step) -> StepProcess:
        folder = place.folder / step.slug
        return StepProcess(step, replace(place, folder=folder, step=step.name), folder.with_suffix(".txt"))

    waiting: dict[str, StepProcess] = {}
    with hold_device(place):
        try:
            for number, step in enumerate(steps):
                left_s = end - monotonic()
                if reason := _reason_not_to_run(step, place, left_s):
                    yield Outcome(step.name, Verdict.NOT_HERE, reason)
                    continue
                process = waiting.pop(step.name, None) or start(step)
                following = [later for later in steps[number + 1 :] if not _reason_not_to_run(later, place, left_s)]
                if imports_ahead and following and following[0].name not in waiting:
                    waiting[following[0].name] = start(following[0])
                try:
                    outcome = process.run(left_s)
                finally:
                    process.end()
                yield outcome
        finally:
            for process in waiting.values():
                process.end()


@contextmanager
def hold_device(place: Place) -> Iterator[None]:
    """Keep a context on a CUDA device: without persistence mode, the driver stops when no process has one.

    place : device of the steps; nothing is done if it is not a CUDA device
    """
    if place.kind != "cuda":
        yield
        return
    holder = subprocess.Popen([sys.executable, "-c", HOLD, place.device], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        holder.communicate()


def run_step(step: Step, place: Place) -> Outcome:
    """Run a step in this process, on the device and with the files of `place`; an error becomes its verdict."""
    verdict, reason = Verdict.OK, ""
    try:
        step.run(place)
    except NotHereError as error:
        verdict, reason = Verdict.NOT_HERE, str(error)
    except WrongError as error:
        verdict, reason = Verdict.WRONG, str(error)[:MOST_CHARACTERS]
    except Exception as error:
        traceback.print_exc()
        last = (str(error).strip().splitlines() or [""])[-1]
        verdict, reason = Verdict.WRONG, f"{type(error).__name__}: {last}"[:MOST_CHARACTERS]
    return Outcome(step.name, verdict, reason, read_facts(place.facts, step.name))


def main(steps: Mapping[str, Step], name: str, words: str) -> None:
    """Run the step `name` when a line arrives on stdin, and write its outcome into its folder.

    words : the `Place` as JSON
    """
    end_with_parent()
    plain = json.loads(words)
    place = Place(**{**plain, "folder": Path(plain["folder"]), "facts": Path(plain["facts"])})
    step = steps[name]
    for module in step.modules:
        with suppress(ImportError):
            import_module(module)
    if sys.stdin.readline():
        # programs that the step starts get no input
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        threading.Thread(target=_print_stacks, daemon=True).start()
        outcome = run_step(step, place)
        (place.folder / OUTCOME).write_text(json.dumps(asdict(outcome)), encoding="utf-8")


def _print_stacks() -> None:
    """Print the stack of each thread at intervals, to locate a step that is ended at its time limit.

    `faulthandler.dump_traceback_later` reads the stacks without Python's lock and crashes Python 3.12.
    """
    while True:
        sleep(STACKS_EVERY_S)
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                print(f"thread {ident}\n{''.join(traceback.format_stack(frame)[-FRAMES:])}")


def _reason_not_to_run(step: Step, place: Place, left_s: float) -> str:
    if step.needs_cuda and place.kind != "cuda":
        return step.needs_cuda
    return f"{max(left_s, 0):.0f} s are left" if left_s <= step.least_s else ""


def _python_path() -> str:
    paths = [str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, paths + [str(ROOT)] * (str(ROOT) in sys.path)))


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:MOST_CHARACTERS] if lines else "it wrote nothing"


if __name__ == "__main__":
    from gpu.steps import STEPS

    main(STEPS, *sys.argv[1:])
