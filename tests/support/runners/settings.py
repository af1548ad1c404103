"""Settings by which tests measure cases on the CPU, from command-line options."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.preceding_calls import PrecedingCalls
from opgrip.replay.command.run_requests import request_with
from opgrip.replay.results.results import Result
from opgrip.replay.run.measure import measure_cases
from opgrip.replay.run.workload import Workload, workload_for


def settings_of(*, store: Path | None = None, memory: bool = False, detail: bool = False, **options: Any) -> Workload:
    """Return the settings of a replay with these command-line options; compiled programs are cached only in `store`."""
    plan = replace(request_with("trace.jsonl", **options), store=None if store is None else str(store), detail=detail)
    return replace(workload_for(plan), memory=memory)


def rows_of(
    cases: Sequence[Case],
    settings: Workload,
    surroundings: PrecedingCalls | None = None,
    announce: Callable[[int, int], None] = lambda number, row: None,
) -> list[Result]:
    rows = {rows[0].case: rows for rows in measure_cases(cases, settings, surroundings, announce)}
    return [row for case in cases for row in rows[case.number]]
