"""Try one model in one run in this process."""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.capture import Capture
from opgrip.capture.command.audit import audit
from opgrip.capture.models import load_program
from opgrip.capture.models.program import ModelProgram
from opgrip.capture.models.sources import ModelOptions
from opgrip.cli.option_types import image_size
from opgrip.replay import replay
from opgrip.traces import load
from opgrip.traces.schema.records import OPERATOR

SAID = "said.txt"  # file name for the output of a trial
# stages of a trial in order, which are the keys of its outcome
STAGES = ("native", "counted", "captured", "audited", "replayed")
REASONS = 3  # largest number of reported reasons for cases that are not ok


class Counting(TorchDispatchMode):
    """Count operators independently of opgrip."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Trial:
    """Model that is rebuilt for each of its steps, with the same weights, inputs and random numbers.

    about : `model`, and as in `ModelOptions`, `run`, `size` (of the input), `batch_size` and `cfg_options`
    folder : folder for the trace
    """

    def __init__(self, about: dict[str, Any], folder: Path) -> None:
        size = about.get("size")
        self._options = ModelOptions(
            run=about["run"],
            input_size=image_size(size) if size else None,
            batch_size=about.get("batch_size"),
            cfg_options=tuple(about.get("cfg_options", ())),
        )
        self._model = about["model"]
        self._trace = folder / "trace.jsonl.zst"

    def run(self) -> Iterator[dict[str, Any]]:
        """Yield the result of each stage by its name; if a stage fails, yield its name and the reason, and stop."""
        outcome: dict[str, Any] = {}
        stages = (self._native, self._counted, self._captured, self._audited, self._replayed)
        for name, stage in zip(STAGES, stages, strict=True):
            began = perf_counter()
            try:
                outcome[name] = stage(outcome)
            except Exception as error:
                yield {"failed": name, "reason": f"{type(error).__name__}: {told(str(error))}"}
                return
            outcome[name]["seconds"] = round(perf_counter() - began, 2)
            yield {name: outcome[name]}

    def _native(self, outcome: dict[str, Any]) -> dict[str, Any]:
        step, digest = self._prepared()
        began = perf_counter()
        results = step()
        return {"step_s": round(perf_counter() - began, 3), "digest": digest(results)}

    def _counted(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Return the number of operators that an independent mode sees, and True if two native runs agree."""
        step, digest = self._prepared()
        with Counting() as mode:
            results = step()
        self._counts = mode.counts
        return {"calls": mode.counts.total(), "is_repeatable": digest(results) == outcome["native"]["digest"]}

    def _captured(self, outcome: dict[str, Any]) -> dict[str, Any]:
        step, digest = self._prepared()
        with Capture(self._trace, model=self._program.model, force=True) as capture:
            results = step()
        if capture.problem is not None:
            raise RuntimeError(capture.problem)
        trace = load(self._trace, unbounded=True)
        operators = Counter(trace.calls["op"][trace.calls["kind"] == OPERATOR])
        for item in trace.end.without_work if trace.end is not None else ():
            operators[item.op] += item.count
        return {
            "calls": operators.total(),
            "missing": dict((self._counts - operators).most_common(REASONS)),
            "surplus": dict((operators - self._counts).most_common(REASONS)),
            "dropped": capture.dropped,
            "is_same": digest(results) == outcome["native"]["digest"],
        }

    def _audited(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Return operators that torch and the trace count differently, except ones that any dispatch mode changes."""
        unexplained = self._differing(nullcontext())
        changed: list[str] = []
        if unexplained:
            still = self._differing(Counting())
            changed = [op for op in unexplained if op not in still]
            unexplained = {op: calls for op, calls in unexplained.items() if op in still}
        return {"unexplained": dict(list(unexplained.items())[:REASONS]), "changed_by_modes": changed[:REASONS]}

    def _differing(self, watched: AbstractContextManager[object]) -> dict[str, list[int]]:
        """Return the unexplained differences between the counts of torch and of the trace, by operator.

        watched : context in which the step runs, such as a dispatch mode
        """
        step, _ = self._prepared()

        def run() -> None:
            with watched:
                step()

        differences = audit(self._trace, run)
        return {item.op: [item.torch_calls, item.trace_calls] for item in differences if item.explained is None}

    def _replayed(self, outcome: dict[str, Any]) -> dict[str, Any]:
        frame = replay(self._trace, iterations=1, warmup=0, cache="warm", budget=0.002).frame
        statuses = Counter(frame["status"])
        bad = frame[frame["status"] != "ok"]
        reasons = Counter(f"{op}: {error}" for op, error in zip(bad["op"], bad["error"], strict=True))
        return {"cases": len(frame), "ok": statuses["ok"], "reasons": dict(reasons.most_common(REASONS))}

    def _prepared(self) -> tuple[Callable[[], Any], Callable[[Any], str]]:
        """Return a step that has not run yet, and a function that identifies its results."""
        seed()
        self._program = program = load_program(self._model, self._options)
        inputs = program.inputs()
        seed()
        return lambda: program.step(inputs), lambda results: digest_of(results, program)


def told(text: str) -> str:
    """Return an error as one line without folders of this machine."""
    line = re.sub(r",? the current sys\.path is: .*", "", " ".join(text.split()))
    return re.sub(r"\S*/site-packages/", "", line)[:300]


def seed() -> None:
    """Reset all random number generators."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def digest_of(results: Any, program: ModelProgram) -> str:
    """Return a hash of the bits of a step's results and of the model's state after it."""
    digest = hashlib.blake2b(digest_size=16)
    seen: set[int] = set()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            item = item.detach().cpu()
            digest.update(f"{item.dtype}{tuple(item.shape)}".encode())
            digest.update(item.contiguous().flatten().view(torch.uint8).numpy().tobytes() if item.numel() else b"")
        elif isinstance(item, np.ndarray):
            digest.update(item.tobytes() if item.dtype != object else repr(item.tolist()).encode())
        elif isinstance(item, str | bytes | int | float | complex | bool | None):
            digest.update(repr(item).encode())
        elif id(item) not in seen:
            seen.add(id(item))
            parts = item.items() if isinstance(item, dict) else getattr(item, "__dict__", {}).items()
            for name, value in sorted(parts, key=lambda pair: str(pair[0])):
                digest.update(str(name).encode())
                add(value)
            for value in item if isinstance(item, list | tuple) else ():
                add(value)

    add(results)
    add(dict(program.model.state_dict()))
    return digest.hexdigest()


def run_in_process(about: dict[str, Any], folder: str, answer: Connection) -> None:
    """Run the trial in this process, and send the result of each stage as it ends.

    about, folder : as in `Trial`
    answer : pipe to which the results are sent
    """
    os.environ["OPGRIP_STORE"] = ""
    # keep the models' own output out of the answer
    said = os.open(Path(folder) / SAID, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(said, stream)
    torch.set_num_threads(1)
    for part in Trial(about, Path(folder)).run():
        answer.send(part)
