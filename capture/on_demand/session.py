"""One recording from its request to its file, in the process that is recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from opgrip.capture.on_demand.names import check_pattern, recording_path
from opgrip.capture.on_demand.recording import Extent, Recording
from opgrip.capture.on_demand.settings import Request, Settings
from opgrip.capture.on_demand.step_capture import StepCapture
from opgrip.capture.on_demand.step_sources import StepSource, sources_of
from opgrip.capture.on_demand.trigger import marks
from opgrip.capture.torch_compat.torch_private import collectives_begun, load_private
from opgrip.traces.values import value_models

LOOK_S = 0.05
"""Between two looks at the time while a recording runs."""
GRACE_S = 5.0
"""For steps that are under way when a recording is to end before it has enough."""


class Session:
    """Records what a request asks for.

    Parameters
    ----------
    number : of the recording in its process, from 1
    asked_ns : when it was asked for, as `time.perf_counter_ns` counts
    """

    def __init__(self, settings: Settings, request: Request, number: int, asked_ns: int) -> None:
        pattern = request.output or settings.output
        check_pattern(pattern)
        self.request = request
        self.extent = _extent(settings, request)
        self.step_module = request.step_module or settings.step_module
        self._asked_ns = asked_ns
        about = {"recording": number, "sampled": request.sampled, "step_module": self.step_module}
        details = {"on_demand": about}
        self.path = recording_path(str(Path(pattern)), number)
        options = {**settings.options, **request.options, "details": details}
        self._capture = StepCapture(self.path, self.extent.warmup > 0, **options)
        self._recording = Recording(self._capture, self.extent, position)
        self._sources: list[StepSource] = []
        self._stopping = threading.Event()
        self._grace_s = GRACE_S
        self._gave_way = False

    def run(self, armed: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
        """Record, and tell what was recorded.

        Parameters
        ----------
        armed : is told once the next step will be noticed

        Raises
        ------
        UserError : where nothing can be written
        """
        self._capture.open()
        try:
            self._watch()
            armed({"file": str(self.path), "position": position(), "steps_are": [item.name for item in self._sources]})
            self._wait()
        finally:
            self._unwatch()
            self._recording.end()
            if not self._recording.steps and not self._recording.cut:
                self._capture.discard()
            self._capture.close()
        return self._result()

    def stop(self, discard: bool = False, grace_s: float = GRACE_S) -> None:
        """End the recording before it has enough.

        Parameters
        ----------
        discard : leave no file
        grace_s : for steps that are under way
        """
        self._grace_s = grace_s
        if discard:
            self._capture.discard()
        self._stopping.set()

    def give_way(self) -> bool:
        """End it for somebody who asks, where it is a sample that waits for its first step."""
        if not self.request.sampled or self._recording.has_begun:
            return False
        self._gave_way = True
        self.stop(discard=True, grace_s=0.0)
        return True

    def abandon(self) -> None:
        """Forget all of it, in a forked process, of whose threads this one alone is left."""
        self._recording.abandon()
        self._unwatch()

    def _watch(self) -> None:
        self._sources = sources_of(self._recording, self.step_module)
        for source in self._sources:
            source.enter()

    def _unwatch(self) -> None:
        for source in self._sources:
            source.leave()

    def _wait(self) -> None:
        recording, asked_s, stopped_s = self._recording, monotonic(), None
        while not recording.done.wait(LOOK_S):
            recording.look()
            now = monotonic()
            if stopped_s is None and self._stopping.is_set():
                stopped_s = now
                recording.end_when_idle()
            if stopped_s is not None and now - stopped_s >= self._grace_s:
                return
            if not recording.has_begun and now - asked_s > self.request.wait_s:
                return

    def _result(self) -> dict[str, Any]:
        capture, recording = self._capture, self._recording
        first_ns = recording.first_call_ns
        return {
            "file": str(capture.path) if capture.calls and capture.problem is None else None,
            "steps": recording.steps,
            "cut": recording.cut,
            "calls": capture.calls,
            "signatures": capture.signatures,
            "dropped": capture.dropped,
            "bytes": capture.bytes_written,
            "limit": capture.stopped,
            "waited_s": None if first_ns is None else (first_ns - self._asked_ns) / 1e9,
            "began_at": recording.began_at,
            "problem": self._problem(),
            "notes": list(capture.notes()),
        }

    def _problem(self) -> str | None:
        """Why there is no trace; None where there is one."""
        if self._capture.problem is not None:
            return str(self._capture.problem)
        if self._recording.steps or self._recording.cut or self._gave_way:
            return None
        if self._recording.refused:
            return f"no step could be recorded: {'; '.join(self._recording.refused)}"
        if self._stopping.is_set():
            return "it was stopped before a step had begun"
        if self.step_module is not None:
            return f"no module of a class {self.step_module} was called within {self.request.wait_s:g} s"
        are = " or ".join(source.name for source in self._sources)
        return (
            f"no step began within {self.request.wait_s:g} s: steps are {are} here; name others with --step-module, "
            "or call opgrip.capture.step() after each"
        )


def load() -> None:
    """Load what the first recording would load, which takes seconds."""
    load_private()
    value_models.names()


def position() -> int | None:
    """Where the program is, in a count that all ranks of a job have alike: its own steps, else collectives."""
    return marks.steps or collectives_begun()


def _extent(settings: Settings, request: Request) -> Extent:
    seconds = settings.seconds if request.seconds is None else request.seconds
    steps = request.steps
    if steps is None:
        # seconds that were asked for without steps are the limit
        steps = None if request.seconds is not None else settings.steps
    warmup = settings.warmup if request.warmup is None else request.warmup
    return Extent(steps, seconds, warmup, request.begins_at)
