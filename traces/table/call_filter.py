"""Selection of calls by phase, step, and shell patterns of module and operator names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opgrip.cli.option_types import matches
from opgrip.errors import UserError
from opgrip.traces.codec.call_blocks import CallBlock
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.schema.records import PHASES, Record, Scope, Signature, Thread
from opgrip.traces.table.call_source import NumberSet, selected
from opgrip.traces.table.step_starts import StepStarts, find_step_starts


class CallFilter:
    """A filter that selects the calls that meet all conditions.

    Parameters
    ----------
    phase, module, op : names and patterns, of which a call must match one; an empty sequence accepts every call
    steps : selected steps, counted from 0, and the start times of each process's steps; None selects every step
    """

    def __init__(
        self,
        phase: Sequence[str],
        module: Sequence[str],
        op: Sequence[str],
        steps: tuple[range, StepStarts] | None = None,
    ) -> None:
        self._phase, self._module, self._op, self._steps = phase, module, op, steps
        self._modules: dict[int, str] = {}
        self._processes: dict[int, int | None] = {}
        self._scopes, self._signatures = NumberSet(), NumberSet()

    def note(self, record: Record | CallBlock) -> None:
        """Store a record that later calls refer to."""
        if isinstance(record, Scope):
            # as in `Trace.calls`, a backward call belongs to the module of its forward call
            of_forward = None if record.forward is None else self._modules.get(record.forward)
            name = record.module if of_forward is None else of_forward
            self._modules[record.number] = record.module
            self._scopes.put(record.number, matches(record.phase, self._phase) and matches(name, self._module))
        elif isinstance(record, Signature):
            self._signatures.put(record.number, matches(record.op, self._op))
        elif isinstance(record, Thread):
            self._processes[record.number] = record.process

    def select(self, block: CallBlock) -> CallBlock:
        """Return the selected calls of a block."""
        flags = np.ones(len(block), dtype=np.bool_)
        if self._phase or self._module:
            flags &= self._scopes.flags(block.scope)
        if self._op:
            flags &= self._signatures.flags(block.signature)
        if self._steps is not None:
            chosen, starts = self._steps
            steps = starts.steps_of(self._processes.get(block.thread), block.start_ns)
            flags &= (steps >= chosen.start) & (steps < chosen.stop)
        return selected(block, flags)


def call_filter(
    reader: TraceReader,
    phase: str | Sequence[str],
    module: str | Sequence[str],
    op: str | Sequence[str],
    steps: range | int | None,
) -> CallFilter | None:
    """Return the filter for some conditions, or None if all are empty.

    If steps are selected, the trace is read once to find where they start, because a file does not mark them.
    """
    phases, modules, ops = ((names,) if isinstance(names, str) else tuple(names) for names in (phase, module, op))
    if phases and not any(matches(name, phases) for name in PHASES):
        raise UserError(f"there is no phase {', '.join(map(str, phases))}", f"there are {', '.join(PHASES)}")
    if steps is not None:
        if not isinstance(steps, int | range):
            raise UserError(f"steps are {steps!r}", "give a number, or a range as in range(3, 5)")
        chosen = range(steps, steps + 1) if isinstance(steps, int) else steps
        return CallFilter(phases, modules, ops, (chosen, _starts_of(reader, chosen)))
    return CallFilter(phases, modules, ops) if phases or modules or ops else None


def _starts_of(reader: TraceReader, steps: range) -> StepStarts:
    """Return when the steps of a trace began, after checking that the selected steps exist.

    Raises
    ------
    UserError : if the trace does not distinguish its steps, or lacks a selected one
    """
    if steps.step != 1 or not steps or steps.start < 0:
        raise UserError(f"{steps} contains no steps that follow each other", "count them from 0, as in range(3, 5)")
    starts = find_step_starts(lambda: reader.again().columns())
    if starts is None:
        raise UserError("the trace does not say how many steps it has", "choose by phase or module")
    if not starts.begins:
        raise UserError(
            "its steps cannot be separated: no operator was called exactly once per step", "choose by phase or module"
        )
    count = max(map(len, starts.begins.values()))
    if steps.start >= count:
        raise UserError(f"there is no step {steps.start}", f"the trace has the steps 0 to {count - 1}")
    return starts
