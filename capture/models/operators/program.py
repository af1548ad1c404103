"""The program that a capture records of operators: a step runs the samples of one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from opgrip.capture.models.operators.choosing import Operators, choose
from opgrip.capture.models.operators.coverage import Coverage
from opgrip.capture.models.operators.registered import Entry
from opgrip.capture.models.operators.running import SampleRunner, SampleScope
from opgrip.capture.models.operators.shapes import RESIZERS
from opgrip.capture.models.operators.trace_calls import trace_entries
from opgrip.capture.models.program import OperatorOptions, Program
from opgrip.errors import UserError
from opgrip.traces.table.trace import Trace, load


def operators_program(source: str, names: Sequence[str], device: str, seed: int, options: OperatorOptions) -> Program:
    """The program of some categories of operators, or operators of some names.

    Raises
    ------
    UserError : where there are none of such a name, or the trace that shapes come from cannot be read
    """
    # before the table, which takes seconds
    trace = None if options.shapes_from is None else load(options.shapes_from)
    operators = choose(names, seed)
    coverage = Coverage()
    runner = SampleRunner(device, seed, options.per_dtype, coverage, RESIZERS.get(options.shapes))
    entries = list(operators.entries)
    if trace is not None:
        runner.most = 0
        entries = _entries_of_trace(operators, runner, trace, str(options.shapes_from))
    root = nn.Module()
    # by their full names, which have dots
    root._modules.update({entry.name: SampleScope() for entry in entries})
    remaining = iter(entries)

    def step(_: object) -> None:
        entry = next(remaining)
        scope = root._modules[entry.name]
        assert scope is not None
        if not operators.is_spare(entry) or entry.function not in coverage.operators:
            runner.run(entry, scope)

    def finish() -> Iterable[str]:
        operators.tell_uncovered(coverage)
        if options.uncovered is not None:
            coverage.write(options.uncovered, force=True)
        return list(coverage.lines(options.uncovered))

    details: dict[str, Any] = {"source": source, "shapes": options.shapes, "per_dtype": options.per_dtype}
    if options.shapes_from is not None:
        details["shapes_from"] = str(options.shapes_from)
    return Program(
        name=re.sub(r"\W+", "_", source.partition(":")[2]).strip("_") or "operators",
        model=root,
        inputs=lambda: None,
        step=step,
        details=details,
        steps=len(entries),
        finish=finish,
    )


def _entries_of_trace(operators: Operators, runner: SampleRunner, trace: Trace, path: str) -> list[Entry]:
    """The operators that the chosen ones call, as a trace calls them."""
    functions = {str(function): function for function in runner.operators_of(operators.entries)}
    entries = list(trace_entries(trace, functions, runner.coverage))
    if not entries:
        raise UserError(f"{path} calls none of these operators", f"opgrip trace info {path} has its")
    return entries
