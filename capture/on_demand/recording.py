"""A recording: the steps that begin after it was asked for, each whole, until there are enough."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING
from weakref import ref

from opgrip.cli.command import STEP
from opgrip.errors import one_line, raise_if_from_program

if TYPE_CHECKING:
    from opgrip.capture.on_demand.step_capture import StepCapture, ThreadStep


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is recorded.

    Attributes
    ----------
    steps : steps that are recorded; None for as many as begin in the time
    seconds : after the first step began, no other does; None for no such limit
    warmup : steps before those, in which the capture learns
    begins_at : the first step is the first to begin from this position of the program on; None for the next one
    """

    steps: int | None = 3
    seconds: float | None = None
    warmup: int = 1
    begins_at: int | None = None


class Life:
    """Is there as long as a thread is, whose number may be another thread's soon after."""

    __slots__ = ("__weakref__",)


class _Here(threading.local):
    def __init__(self) -> None:
        self.life = Life()


_here = _Here()


def life_here() -> Life:
    """That of this thread."""
    return _here.life


class Recording:
    """Says which steps are recorded, and records them in their own threads.

    Parameters
    ----------
    position : where the program is, in the count that `Extent.begins_at` means

    Attributes
    ----------
    steps : how many were recorded and have ended
    cut : how many had not ended when the recording did, or their threads
    refused : why steps could not be recorded, and how many
    done : nothing more will be recorded
    began_at : the position at which the first step began
    first_call_ns : when the first step that is recorded began, as `perf_counter_ns` counts; None before
    """

    def __init__(self, capture: StepCapture, extent: Extent, position: Callable[[], int | None]) -> None:
        self.capture = capture
        self.extent = extent
        self.steps = self.cut = 0
        self.refused: Counter[str] = Counter()
        self.done = threading.Event()
        self.began_at: int | None = None
        self.first_call_ns: int | None = None
        self._position = position
        self._lock = threading.Lock()
        self._learned = self._begun = 0
        self._running: dict[int, tuple[ThreadStep, ref[Life]]] = {}
        self._learning = extent.warmup > 0
        self._until: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a step has begun."""
        return bool(self._learned or self._begun or self._running)

    def begin_step(self, nested: bool) -> ThreadStep | None:
        """Record this thread until `end_step`; None where this step is not recorded. Never raises.

        Parameters
        ----------
        nested : as in `StepCapture.enter_step`
        """
        try:
            with self._lock:
                if not self._is_wanted():
                    self.capture.pass_step()
                    return None
                if self.capture.leaves_out_step():
                    return None
                if not self.has_begun:
                    self.began_at = self._position()
                label = None if self._learning else f"{STEP} {self._begun + 1}"
                step = self.capture.enter_step(nested, label)
                self._running[id(step)] = step, ref(life_here())
                if not self._learning:
                    self._note_begin()
                return step
        except Exception as error:
            raise_if_from_program(error)
            self.refused[one_line(error)] += 1
            return None

    def end_step(self, step: ThreadStep) -> bool:
        """Record this thread no more; False where that is to be tried again later. Never raises."""
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
        """Let no step begin any more; those that are under way are cut."""
        with self._lock:
            if not self.done.is_set() and not self._learning:
                self.cut += len(self._running)
            self.done.set()

    def end_when_idle(self) -> None:
        """Let no step begin any more, and end when those under way have ended."""
        with self._lock:
            self._until = monotonic()
            self._look_for_end()

    def look(self) -> None:
        """End where the time is over and no step is under way; those of threads that have ended are cut."""
        with self._lock:
            for number in [number for number, (_, life) in self._running.items() if life() is None]:
                del self._running[number]
                if self._learning:
                    self._learned += 1
                else:
                    self.cut += 1
            self._look_for_end()

    def abandon(self) -> None:
        """Let no step begin, in a forked process, where threads that are no more may have held each lock."""
        self._lock = threading.Lock()
        self.done = threading.Event()
        self.done.set()

    def _is_wanted(self) -> bool:
        if self.done.is_set():
            return False
        if not self.has_begun and self.extent.begins_at is not None:
            position = self._position()
            if position is not None and position < self.extent.begins_at:
                return False
        if self._learning and self._learned + len(self._running) >= self.extent.warmup:
            if self._running:
                return False
            self._learning = False
            self.capture.set_learning(False)
        if self._until is not None and monotonic() >= self._until:
            self._look_for_end()
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
        self._look_for_end()

    def _look_for_end(self) -> None:
        """The lock is held."""
        enough = self.extent.steps is not None and self.steps + self.cut >= self.extent.steps
        over = self._until is not None and monotonic() >= self._until
        if (enough or over) and not self._running:
            self.done.set()
