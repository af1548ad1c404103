"""The sources that read traces, and files of PARAM's operator configurations."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path

from opgrip.errors import UserError
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.cases.selection import CALL, FUNCTION, Selection
from opgrip.replay.cases.sources import CaseSet, sources
from opgrip.replay.cases.sources.samples import add_content, gripped_calls
from opgrip.replay.cases.subgraphs import make_units
from opgrip.traces import TraceReader, load
from opgrip.traces.io.foreign_files import format_of
from opgrip.traces.io.shipped_traces import trace_file
from opgrip.traces.zoo.manifest import chosen_numbers


class TraceSource:
    lacks: Sequence[str] = ("samples",)
    hint = "replay samples with: opreplay samples --tag ..."
    place = 1000
    in_program = True

    def takes(self, target: str) -> bool:
        return True

    def open(self, target: str, selection: Selection, extensions: Collection[str]) -> CaseSet:
        if selection.samples and selection.unit != FUNCTION:
            raise UserError("--samples is for gripped calls of a trace", "give a trace, and --unit function")
        trace = load(target, selection.partial, selection.unbounded)
        if selection.samples:
            return CaseSet(gripped_calls(trace, selection, list(map(Path, selection.samples))), trace)
        if selection.unit != CALL:
            return CaseSet(make_units(trace, selection, selection.unit, extensions), trace)
        cases = make_cases(trace, selection)
        is_whole = selection.selects_all and chosen_numbers(trace.header) is None
        return CaseSet(cases, trace, are_calls=True, all_cases=cases if is_whole else None)

    def fingerprint(self, target: str) -> str:
        path = trace_file(target)
        digest = hashlib.blake2b(digest_size=16)
        if not path.is_dir():
            add_content(digest, path)
            return digest.hexdigest()
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            digest.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode())
            add_content(digest, file)
        return digest.hexdigest()


sources.register("trace")(TraceSource())


CONFIGURATIONS = "param"  # name of the format of PARAM's files of operator configurations


class ConfigurationSource:
    lacks: Sequence[str] = ("samples",)
    hint = "replay samples with: opreplay samples --tag ..."
    place = 900
    in_program = False

    def takes(self, target: str) -> bool:
        path = Path(target)
        return path.is_file() and format_of(path) == CONFIGURATIONS

    def open(self, target: str, selection: Selection, extensions: Collection[str]) -> CaseSet:
        if selection.unit != CALL:
            raise UserError("--unit is for traces of programs", "leave it out for a file of configurations")
        reader = TraceReader(target, selection.unbounded, CONFIGURATIONS, selection)
        trace = load(target, selection.partial, selection.unbounded, reader)
        return CaseSet(make_cases(trace, selection, in_order=True), trace, is_cut=True)

    def fingerprint(self, target: str) -> str:
        return TraceSource().fingerprint(target)


sources.register("configurations")(ConfigurationSource())
