"""Samples: those that ship, and those that were gripped."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from opgrip.errors import UserError
from opgrip.replay.cases.cases import ALL_EXCLUDED
from opgrip.replay.cases.samples import fingerprint, names_samples, sample_cases
from opgrip.replay.cases.selection import Selection
from opgrip.replay.cases.sources.source import CaseSet, sources


class SampleSource:
    """`samples`, `sample:NAME`, or a folder that `grip` wrote."""

    lacks: Sequence[str] = ("traces",)
    hint = "leave it out with samples"
    place = 100
    in_program = False

    def takes(self, target: str) -> bool:
        """The name of what ships, or a folder."""
        return names_samples(target)

    def open(self, target: str, selection: Selection, extensions: Collection[str]) -> CaseSet:
        """A case for each configuration; raises `UserError` where there is none."""
        if selection.samples:
            raise UserError("--samples is for gripped calls of a trace", "give a trace, and --unit function")
        cases = [case for case in sample_cases(target, selection.op, selection.tag) if not selection.excludes(case.op)]
        if not cases:
            raise UserError(*ALL_EXCLUDED)
        # inputs of samples that ship are made here; code of gripped ones is loaded in a worker
        has_run_code = any(case.load is None for case in cases)
        return CaseSet(cases[: selection.top], has_run_code=has_run_code)

    def fingerprint(self, target: str) -> str:
        """A hash of their code and calls."""
        return fingerprint(target)


sources.register("samples")(SampleSource())
