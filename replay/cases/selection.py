"""Which cases are replayed."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from opgrip.cli.case_slices import Cut
from opgrip.cli.command import UNBOUNDED_HELP, positive
from opgrip.cli.options import CASES, RUN, option, titled

CALL, FUNCTION, MODULE = "call", "function", "module"
UNIT_KINDS = (CALL, FUNCTION, MODULE)


@titled("which cases")
@dataclass(frozen=True, slots=True)
class Selection(Cut):
    """Which calls of a trace, or which samples, are replayed. Patterns are shell patterns."""

    unit: str = option(
        CALL,
        "what a case is: one call, or all calls of a Python function or a module as one, which --op and --module "
        "name (default: %(default)s)",
        choices=UNIT_KINDS,
        only=("single cases", "traces"),
        role=CASES,
    )
    samples: tuple[str, ...] = option(
        (),
        "with --unit function: calls of gripped functions, by the code in sample folders that you trust; "
        "can be repeated",
        repeated=True,
        metavar="FOLDER",
        only=("single cases",),
        role=CASES,
    )
    tag: tuple[str, ...] = option(
        (),
        "only samples with this tag; can be repeated",
        repeated=True,
        metavar="TAG",
        only=("single cases", "samples"),
        role=CASES,
    )
    op: tuple[str, ...] = option(
        (),
        "only operators or samples of such names; can be repeated",
        repeated=True,
        metavar="GLOB",
        only=("single cases",),
        role=CASES,
    )
    exclude_op: tuple[str, ...] = option(
        (),
        "all but operators or samples of such names; can be repeated",
        repeated=True,
        metavar="GLOB",
        only=("single cases",),
        role=CASES,
    )
    module: tuple[str, ...] = option(
        (),
        "only calls of modules of such paths; can be repeated",
        repeated=True,
        metavar="GLOB",
        only=("single cases", "traces"),
        role=CASES,
    )
    label: tuple[str, ...] = option(
        (),
        "only calls within such labels of record_function; can be repeated",
        repeated=True,
        metavar="GLOB",
        only=("single cases", "traces"),
        role=CASES,
    )
    split: bool = option(
        False,
        "a row for each way in which calls of a signature behave, where those of some places take other times",
        only=("single cases", "traces"),
        role=RUN,
    )
    top: int | None = option(
        None,
        "only the N cases with the largest share of time, of several traces N of each; a sequence runs all calls, and "
        "gives the rows of N",
        parse=positive,
        metavar="N",
        role=CASES,
    )
    unbounded: bool = option(
        False,
        UNBOUNDED_HELP,
        only=("traces",),
        role=CASES,
    )
    partial: bool = option(
        False,
        "replay what there is of a cut or damaged trace",
        only=("traces",),
        role=CASES,
    )

    @property
    def selects_all(self) -> bool:
        patterns = self.op or self.exclude_op or self.module or self.label
        return self.unit == CALL and not patterns and not self.split and self.top is None

    def excludes(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.exclude_op)
