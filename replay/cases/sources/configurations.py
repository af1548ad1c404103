"""Operator configurations: files that stand for many cases, of which those are made that are asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path

from opgrip.errors import UserError
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.cases.selection import CALL, Selection
from opgrip.replay.cases.sources.source import CaseSet, sources
from opgrip.traces import TraceReader, load
from opgrip.traces.formats.param import NAME
from opgrip.traces.io.foreign_files import format_of


class ConfigurationSource:
    """A file of PARAM's configurations: its cases are numbered in its order, and `--start` counts these."""

    lacks: Sequence[str] = ("samples",)
    hint = "replay samples by: opreplay samples --tag ..."
    place = 900
    in_program = False

    def takes(self, target: str) -> bool:
        """A file that is such by its content."""
        path = Path(target)
        return path.is_file() and format_of(path) == NAME

    def open(self, target: str, selection: Selection, extensions: Collection[str]) -> CaseSet:
        """The cases of the part that is asked for; raises `UserError` where there are none."""
        if selection.unit != CALL:
            raise UserError("--unit is for traces of programs", "leave it out with configurations")
        reader = TraceReader(target, selection.unbounded, NAME, selection)
        trace = load(target, selection.partial, selection.unbounded, reader)
        return CaseSet(make_cases(trace, selection, in_order=True), trace, is_cut=True)

    def fingerprint(self, target: str) -> str:
        """A hash of the file."""
        return hashlib.blake2b(Path(target).read_bytes(), digest_size=16).hexdigest()


sources.register("configurations")(ConfigurationSource())
