"""The program that a capture records of operators: a step runs the samples of one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opgrip.capture.operators.categories import ALL, CATEGORIES, CUSTOM, SCHEMA
from opgrip.capture.operators.coverage import Coverage
from opgrip.capture.operators.entry import Entry
from opgrip.capture.operators.registered import is_composite, is_custom, is_public, name_of, registered_operators
from opgrip.capture.operators.running import SampleRunner, SampleScope
from opgrip.capture.operators.schemas import NoSamples, check_schema, schema_entry
from opgrip.capture.operators.torch_tables import table_entries
from opgrip.capture.program import OperatorOptions, Program
from opgrip.traces.errors import UserError
from opgrip.traces.suggestions import did_you_mean


def operators_program(
    source: str, names: Sequence[str], device: str, seed: int, options: OperatorOptions
) -> Program:
    """The program of some categories of operators, or operators of some names.

    Raises
    ------
    UserError : where there are none of such a name
    """
    entries = list(selected_entries(names))
    coverage = Coverage()
    runner = SampleRunner(device, seed, options.per_dtype, coverage)
    root = nn.Module()
    # by their full names, which have dots
    root._modules.update({entry.name: SampleScope() for entry in entries})
    remaining = iter(entries)

    def step(_: object) -> None:
        entry = next(remaining)
        scope = root._modules[entry.name]
        assert scope is not None
        runner.run(entry, scope)

    def finish() -> Iterable[str]:
        if options.uncovered is not None:
            coverage.write(options.uncovered, force=False)
        return coverage.lines(options.uncovered)

    return Program(
        name=re.sub(r"\W+", "_", source.partition(":")[2]).strip("_") or "operators",
        model=root,
        inputs=lambda: None,
        step=step,
        details={"source": source, "shapes": options.shapes, "per_dtype": options.per_dtype},
        steps=len(entries),
        finish=finish,
    )


def selected_entries(names: Sequence[str]) -> Iterator[Entry]:
    """The operators of some categories and names, each once.

    Raises
    ------
    UserError : where a name is none of a category or operator
    """
    entries: dict[str, Entry] = {}
    for entry in table_entries():
        # some stand twice
        entries.setdefault(entry.name, entry)
    chosen: set[str] = set()
    for name in names:
        of_name = {entry.name for entry in entries.values() if _is_named(entry, name)}
        if not of_name and name not in CATEGORIES:
            raise UserError(f"there is no operator {name!r}", did_you_mean(name, [*CATEGORIES, *entries]))
        chosen |= of_name
    return (entry for entry in entries.values() if entry.name in chosen)


def _is_named(entry: Entry, name: str) -> bool:
    if name in CATEGORIES:
        return name == ALL or name in entry.categories
    plain = re.sub(r"^(aten|torch)(\.|::)", "", name)
    # all variants of a name
    return fnmatchcase(entry.name, plain) or entry.name.startswith(f"{plain}.")
