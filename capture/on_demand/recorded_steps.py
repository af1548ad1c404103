"""Selection of the steps to record on demand, and recording of each step in its thread."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING
from weakref import ref

from opgrip.cli.command import STEP
from opgrip.errors import one_line, raise_if_from_program

if TYPE_CHECKING:
    from opgrip.capture.on_demand.session import StepCapture, ThreadStep


@dataclass(frozen=True, slots=True)
class Extent:
    """The steps that a recording on demand includes.

    steps : number of recorded steps; None for all steps that begin within `seconds`
    seconds : time in seconds after the start of the first step during which more steps may begin
    warmup : number of steps before the recorded ones in which the capture examines signatures without recording calls
    """

    steps: int | None = 3
    seconds: float | None = None
    warmup: int = 1


class ThreadLife:
    """Object in a thread's local storage, which is deleted when the thread ends. It identifies the thread, whose number
    may be reused.
    """

    __slots__ = ("__weakref__",)


class _Here(threading.local):
    def __init__(self) -> None:
        self.life = ThreadLife()


here = _Here()


class StepRecording:
    """Decides which steps are recorded, and records each in the thread that runs it.

    steps : number of recorded steps that have ended
    cut : number of steps that were unfinished when the recording or their thread ended
    refused : number of steps that could not be recorded, by reason
    done : event that is set when nothing more will be recorded
    first_call_ns : start of the first recorded step, by `perf_counter_ns`
    """

    def __init__(self, capture: StepCapture, extent: Extent) -> None:
        self.capture = capture
        self.extent = extent
        self.steps = self.cut = 0
        self.refused: Counter[str] = Counter()
        self.done = threading.Event()
        self.first_call_ns: int | None = None
        self._lock = threading.Lock()
        self._learned = self._begun = 0
        self._running: dict[int, tuple[ThreadStep, ref[ThreadLife]]] = {}
        self._learning = extent.warmup > 0
        self._until: float | None = None

    @property
    def has_begun(self) -> bool:
        return bool(self._learned or self._begun or self._running)

    def begin_step(self, nested: bool) -> ThreadStep | None:
        """Record this thread until `end_step` is called, and return the step; return None if it is not recorded.

        Never raises an error.

        nested : True if the step is one call of a module, which always ends before a dispatch mode that was on when it
            began. If False, the step is refused while a dispatch mode of the program is on
        """
        try:
            with self._lock:
                if not self._is_wanted():
                    self.capture.pass_step()
                    return None
                if self.capture.leaves_out_step():
                    return None
                label = None if self._learning else f"{STEP} {self._begun + 1}"
                step = self.capture.enter_step(nested, label)
                self._running[id(step)] = step, ref(here.life)
                if not self._learning:
                    self._note_begin()
                return step
        except Exception as error:
            raise_if_from_program(error)
            self.refused[one_line(error)] += 1
            return None

    def end_step(self, step: ThreadStep) -> bool:
        """Stop recording the thread of `step`; return False if that is not possible yet and must be tried again later.

        Never raises an error.
        """
        try:
            is_left = self.capture.leave_step(step)
        except Exception as error:
            raise_if_from_program(error)
            self.refused[one_line(error)] += 1
            is_left = True
        finally:
            with self._lock:
                if self._running.pop(id(step), None) is not None and not self.done.is_set():
                    self._count_end()
        return is_left

    def end(self) -> None:
        """Let no more steps begin, and count unfinished steps as cut."""
        with self._lock:
            if not self.done.is_set() and not self._learning:
                self.cut += len(self._running)
            self.done.set()

    def end_when_idle(self) -> None:
        """Let no more steps begin, and end the recording when all unfinished steps have ended."""
        with self._lock:
            self._until = monotonic()
            self._check_end()

    def look(self) -> None:
        """Count unfinished steps of threads that have ended as cut, and end the recording if its time is over and no
        step is unfinished.
        """
        with self._lock:
            for number in [number for number, (_, life) in self._running.items() if life() is None]:
                del self._running[number]
                if self._learning:
                    self._learned += 1
                else:
                    self.cut += 1
            self._check_end()

    def abandon(self) -> None:
        """Stop in a forked process, where locks may be held by threads that no longer exist."""
        self._lock = threading.Lock()
        self.done = threading.Event()
        self.done.set()

    def _is_wanted(self) -> bool:
        if self.done.is_set():
            return False
        if self._learning and self._learned + len(self._running) >= self.extent.warmup:
            if self._running:
                return False
            self._learning = False
            self.capture.set_learning(False)
        if self._until is not None and monotonic() >= self._until:
            self._check_end()
            return False
        return self._learning or self.extent.steps is None or self._begun < self.extent.steps

    def _note_begin(self) -> None:
        self._begun += 1
        if self.first_call_ns is None:
            self.first_call_ns = perf_counter_ns()
        if self._until is None and self.extent.seconds is not None:
            self._until = monotonic() + self.extent.seconds

    def _count_end(self) -> None:
        if self._learning:
            self._learned += 1
        else:
            self.steps += 1
        self._check_end()

    def _check_end(self) -> None:
        """End the recording if it has enough steps or its time is over. The caller must hold the lock."""
        enough = self.extent.steps is not None and self.steps + self.cut >= self.extent.steps
        over = self._until is not None and monotonic() >= self._until
        if (enough or over) and not self._running:
            self.done.set()
