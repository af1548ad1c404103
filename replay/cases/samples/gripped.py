"""Cases of functions that were gripped, whose code the user trusts by naming its folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pandas as pd

from opgrip.replay.cases.cases import Case, contexts_of, matches, no_match
from opgrip.replay.cases.functions import function_case
from opgrip.replay.cases.selection import Selection
from opgrip.traces import Trace, load
from opgrip.traces.errors import UserError
from opgrip.traces.live_calls import LiveArguments
from opgrip.traces.records import FUNCTION, HIGHER_ORDER
from opgrip.traces.sample_folder import CALLS, SAMPLE, OpenSample, open_sample


def folders_in(target: Path) -> list[Path]:
    """The sample folders that a path names: itself, or those in it."""
    if (target / SAMPLE).is_file():
        return [target]
    return sorted(path.parent for path in target.glob(f"*/{SAMPLE}"))


def open_folders(targets: Sequence[Path]) -> list[OpenSample]:
    """The samples in folders that the user trusts.

    Raises
    ------
    UserError : where one has none
    """
    opened = []
    for target in targets:
        folders = folders_in(target)
        if not folders:
            raise UserError(f"{target} holds no sample", "name a folder that opgrip grip or opcapture --grip wrote")
        opened += [open_sample(folder) for folder in folders]
    return opened


def gripped_samples(folders: Sequence[Path], patterns: Sequence[str] = (), tags: Sequence[str] = ()) -> Iterator[Case]:
    """A case for each call in sample folders; they are to be numbered.

    Parameters
    ----------
    patterns, tags : see `sample_cases`
    """
    requested_tags = {tag.lower() for tag in tags}
    for sample in map(open_sample, folders):
        if matches(sample.name, patterns) and requested_tags <= {tag.lower() for tag in sample.tags}:
            yield from _cases(
                load(sample.folder / CALLS, partial=False, unbounded=True), {sample.name: sample}, Selection()
            )


def gripped_calls(trace: Trace, selection: Selection, folders: Sequence[Path]) -> list[Case]:
    """The gripped calls of a trace whose samples are in folders that the user trusts.

    Raises
    ------
    UserError : where there is none
    """
    opened = {sample.origin: sample for sample in open_folders(folders)}
    names = _function_calls(trace)["op"]
    if names.empty:
        raise UserError("the trace holds no gripped calls", "capture it with opcapture --grip")
    cases = _cases(trace, opened, selection)
    if not cases:
        raise no_match(names, list(opened), "--samples")
    return cases


def hash_of(folder: Path) -> bytes:
    """A hash of a sample's code and calls."""
    digest = blake2b(digest_size=16)
    for path in sorted([*folder.glob("*.py"), folder / CALLS]):
        digest.update(path.read_bytes())
    return digest.digest()


def _function_calls(trace: Trace) -> pd.DataFrame:
    calls = trace.calls[trace.calls["kind"] == FUNCTION]
    return calls[~calls["op"].astype(str).str.startswith(HIGHER_ORDER)]


def _cases(trace: Trace, opened: Mapping[str, OpenSample], selection: Selection) -> list[Case]:
    """The cases in the order of their first calls.

    What a call took in the program is not told: recording the operators inside takes longer than they do.
    """
    calls = _function_calls(trace)
    calls = calls[np.array([matches(str(name), selection.module) for name in calls["module"]], dtype=bool)]
    counts = calls["signature"].value_counts().to_dict()
    contexts = contexts_of(trace, calls)
    chosen = {
        op: sample
        for op, sample in opened.items()
        if matches(sample.name, selection.op) and not selection.excludes(sample.name)
    }
    live = {op: LiveArguments(trace, sample.classes) for op, sample in chosen.items()}
    cases = []
    for signature in trace.signatures:
        sample = chosen.get(signature.op)
        if sample is None or signature.number not in counts:
            continue
        args, kwargs = live[signature.op].make((signature.args, signature.kwargs))
        case = function_case(sample.function, args, kwargs, sample.name, signature.number)
        context = contexts.get(signature.number, {})
        cases.append(replace(case, count=counts[signature.number], context=context))
    return cases[: selection.top]
