"""The operators that a user names: of torch's table, of other packages, and of torch outside of its table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from opgrip.capture.models.operators.coverage import Coverage
from opgrip.capture.models.operators.registered import (
    Entry,
    is_composite,
    is_custom,
    is_public,
    name_of,
    registered_operators,
)
from opgrip.capture.models.operators.schemas import schema_entries
from opgrip.capture.models.operators.torch_tables import ALL, CATEGORIES, CUSTOM, SCHEMA, table_entries
from opgrip.cli.command import did_you_mean
from opgrip.errors import UserError

NOT_RUN = "no sample calls it"
WITHOUT_TABLE = frozenset({CUSTOM, SCHEMA})
"""Categories for which torch's table is not loaded."""


@dataclass(frozen=True, slots=True)
class Operators:
    """What is run.

    Attributes
    ----------
    reasons : why there are no samples of registered operators, by name
    wanted : registered operators that are to be covered
    """

    entries: Sequence[Entry]
    reasons: dict[str, str] = field(default_factory=dict)
    wanted: Sequence[Any] = ()

    def is_spare(self, entry: Entry) -> bool:
        """Whether an entry is run only where no other calls its operator."""
        return SCHEMA in entry.categories and len(self.wanted) > 0

    def tell_uncovered(self, coverage: Coverage) -> None:
        """Enter the registered operators that no sample calls."""
        for function in self.wanted:
            name = name_of(function)
            if function not in coverage.operators:
                failed = (reason for entry, _, reason in coverage.failures if entry == name)
                coverage.uncovered[name] = self.reasons.get(name) or next(failed, NOT_RUN)


def choose(names: Sequence[str], seed: int) -> Operators:
    """The operators of some categories and names, each once.

    Raises
    ------
    UserError : where a name is none of a category or operator
    """
    registered = [function for function in registered_operators() if _is_runnable(function)]
    entries: dict[str, Entry] = {}
    if not WITHOUT_TABLE.issuperset(names):
        for entry in table_entries():
            # some stand twice
            entries.setdefault(entry.name, entry)
    chosen = {entry.name: entry for name in names for entry in entries.values() if _is_of(entry, name)}
    wanted = [function for function in registered if _is_wanted(function, names)]
    named = [function for function in registered if any(_is_named(function, name) for name in names)]
    for name in names:
        known = name in CATEGORIES or any(_is_of(entry, name) for entry in chosen.values())
        if not known and not any(_is_named(function, name) for function in named):
            near = [*CATEGORIES, *entries, *map(name_of, registered)]
            raise UserError(
                f"there is no operator {name!r}", did_you_mean(name, near, "opinfo:all has all that there are")
            )
    # an operator that is named and stands in the table is run by it
    made = wanted if wanted else [function for function in named if not chosen]
    samples, reasons = schema_entries([function for function in made if not function._schema.is_mutable], seed)
    if named and not chosen and not samples and not wanted:
        name = name_of(named[0])
        raise UserError(f"no samples of {name} can be made", reasons.get(name, "it writes into its arguments"))
    return Operators([*chosen.values(), *samples], reasons, wanted)


def _is_runnable(function: Any) -> bool:
    """Whether an operator can stand in a trace and be called by a program."""
    if is_custom(function):
        return not is_composite(function)
    is_out = any(argument.is_out for argument in function._schema.arguments)
    public = is_public(function)
    return public and not is_out and not is_composite(function)


def _is_wanted(function: Any, names: Sequence[str]) -> bool:
    """Whether a category that is named has all such operators."""
    return ALL in names or (CUSTOM if is_custom(function) else SCHEMA) in names


def _is_of(entry: Entry, name: str) -> bool:
    if name in CATEGORIES:
        return name == ALL or name in entry.categories
    plain = re.sub(r"^(aten|torch)(\.|::)", "", name)
    # all variants of a name
    return fnmatchcase(entry.name, plain) or entry.name.startswith(f"{plain}.")


def _is_named(function: Any, name: str) -> bool:
    full = name_of(function)
    plain = name.replace("::", ".")
    return plain not in CATEGORIES and (fnmatchcase(full, plain) or full.startswith(f"{plain}."))
