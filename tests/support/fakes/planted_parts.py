"""Analysis, source of cases and result file format of another package."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import IO, Any

import torch
from outside import FAILS

from opgrip.cli.command import positive
from opgrip.cli.options import option, titled
from opgrip.errors import UserError
from opgrip.replay.analyses import Analysis, analyses
from opgrip.replay.cases.functions import function_case
from opgrip.replay.cases.selection import Selection
from opgrip.replay.cases.sources import CaseSet, sources
from opgrip.replay.reports import report
from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.results import Result

PREFIX = "powers:"


@titled("budgets")
@dataclass(frozen=True, slots=True)
class BudgetOptions:
    most_us: int | None = option(None, "name the calls that take longer", parse=positive, metavar="US")


@dataclass(frozen=True, slots=True)
class BudgetColumns(Columns):
    over_us: float | None = column("time above the budget", "us", "over us")


@analyses.register("budget")
class BudgetAnalysis(Analysis):
    options = BudgetOptions
    columns = BudgetColumns

    def __init__(self, options: BudgetOptions, session: Any) -> None:
        super().__init__(options, session)
        self._most_us = options.most_us or 0
        self.header = {"most_us": self._most_us}

    @classmethod
    def is_requested(cls, options: BudgetOptions) -> bool:
        return options.most_us is not None

    def add_to(self, rows: Sequence[Result]) -> list[Result]:
        if self._most_us == FAILS:
            raise UserError("no budget is so large", "name another")
        return [row.adding(BudgetColumns(max(0.0, (row.median_us or 0.0) - self._most_us))) for row in rows]

    def print(self, rows: Sequence[Result], file: IO[str]) -> None:
        over = [row for row in rows if BudgetColumns.of(row).over_us]
        print(f"{len(over)} of {len(rows)} rows are over the budget", file=file)


class Powers:
    """Source of cases: `powers:3` has three cases."""

    lacks: Sequence[str] = ("traces", "samples")
    hint = "leave it out with powers"
    place = 10
    in_program = False

    def takes(self, target: str) -> bool:
        return target.startswith(PREFIX)

    def open(self, target: str, selection: Selection, extensions: Collection[str]) -> CaseSet:
        exponents = range(int(target.removeprefix(PREFIX)))
        x = torch.arange(1.0, 9.0)
        cases = [function_case(torch.pow, [x, number], {}, f"pow{number}", number) for number in exponents]
        return CaseSet(cases[: selection.top], has_run_code=True)

    def fingerprint(self, target: str) -> str:
        return blake2b(target.encode()).hexdigest()


sources.register("powers")(Powers())


@report(".tally")
def write_tally(results: Sequence[Result], header: Mapping[str, Any], file: IO[str]) -> None:
    file.write(f"{header['trace']} {header['most_us']} {' '.join(row.op for row in results)}\n")
