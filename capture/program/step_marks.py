"""When the steps of a program began, as the program reports them or as its optimizer shows."""

from __future__ import annotations

from array import array
from time import perf_counter_ns
from typing import Any
from weakref import ref

from opgrip.traces.table.step_starts import MOST_STEPS


class StepMarks:
    """Collects the starts of steps.

    Parameters
    ----------
    started_ns : when the capture began

    Attributes
    ----------
    program_reports : whether the program itself reports its steps
    in_header : whether the trace's header says how many steps there are, so that nothing is collected
    """

    def __init__(self, started_ns: int) -> None:
        self._started_ns = started_ns
        self._reported = array("q")
        self._optimized = array("q", [0])
        self._optimizer: ref[Any] | None = None
        self.program_reports = self.in_header = False

    def begin_step(self) -> None:
        """Note that a recorded step begins, which counts if the program reports its steps."""
        self._add(self._reported)

    def end_optimizer_step(self, optimizer: Any) -> None:
        """Note that an optimizer has stepped: the steps of the first one end the program's, if it reports none."""
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = ref(optimizer)
        if self._optimizer() is optimizer:
            self._add(self._optimized)

    def starts_ns(self) -> list[int]:
        """Return when each step began, since the start of the capture; nothing if no steps are known."""
        starts = self._reported if self.program_reports else self._optimized
        is_known = not self.in_header and (self.program_reports or len(starts) > 1)
        return starts.tolist() if is_known and len(starts) <= MOST_STEPS else []

    def _add(self, starts: array[int]) -> None:
        if len(starts) <= MOST_STEPS and not self.in_header:
            starts.append(perf_counter_ns() - self._started_ns)
