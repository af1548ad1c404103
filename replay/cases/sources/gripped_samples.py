"""Cases of gripped functions, whose code the user trusts by naming its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from opgrip.errors import UserError
from opgrip.replay.cases.cases import Case, contexts_of
from opgrip.replay.cases.functions import NOT_KNOWN, function_case
from opgrip.replay.cases.selection import Selection, matches, no_match
from opgrip.traces import Trace, load
from opgrip.traces.io.sample_folder import CALLS, SAMPLE, OpenSample, SampleFolder, open_sample, read_sample
from opgrip.traces.schema.arguments import Opaque, TensorSpec
from opgrip.traces.schema.python_objects import (
    ArraySpec,
    ModuleSpec,
    NamedSpec,
    ObjectSpec,
    SameSpec,
    ScalarSpec,
    SharedSpec,
    with_children,
)
from opgrip.traces.schema.records import FUNCTION, HIGHER_ORDER, Signature
from opgrip.traces.table.live_calls import LiveArguments


def folders_in(target: Path) -> list[Path]:
    """Return the sample folders that a path names: itself, or the folders in it."""
    if (target / SAMPLE).is_file():
        return [target]
    return sorted(path.parent for path in target.glob(f"*/{SAMPLE}"))


def read_folders(targets: Sequence[Path]) -> list[SampleFolder]:
    """Read the samples of all targets without loading their code; raise `UserError` if a target has none."""
    samples = []
    for target in targets:
        folders = folders_in(target)
        if not folders:
            raise UserError(f"{target} holds no sample", "name a folder that opgrip grip or opcapture --grip wrote")
        samples += [read_sample(folder) for folder in folders]
    return samples


def gripped_samples(folders: Sequence[Path], patterns: Sequence[str] = (), tags: Sequence[str] = ()) -> Iterator[Case]:
    """Yield a case, without a number yet, for each recorded call in sample folders."""
    requested_tags = {tag.lower() for tag in tags}
    for sample in map(read_sample, folders):
        if matches(sample.name, patterns) and requested_tags <= {tag.lower() for tag in sample.tags}:
            # absolute, because values are read after the sample's code has run, which may change the working directory
            trace = load((sample.folder / CALLS).absolute(), partial=False, unbounded=True)
            yield from _cases(trace, {sample.name: sample}, Selection())


def gripped_calls(trace: Trace, selection: Selection, folders: Sequence[Path]) -> list[Case]:
    """Return cases of a trace's gripped calls whose samples are in folders that the user trusts."""
    samples = {sample.origin: sample for sample in read_folders(folders)}
    names = _function_calls(trace)["op"]
    if names.empty:
        raise UserError("the trace holds no gripped calls", "capture it with opcapture --grip")
    cases = _cases(trace, samples, selection)
    if not cases:
        raise no_match(names, list(samples), "--samples")
    return cases


def hash_of(folder: Path) -> bytes:
    digest = blake2b(digest_size=16)
    for path in sorted([*folder.glob("*.py"), folder / CALLS]):
        digest.update(path.read_bytes())
    return digest.digest()


def _function_calls(trace: Trace) -> pd.DataFrame:
    calls = trace.calls[trace.calls["kind"] == FUNCTION]
    return calls[~calls["op"].astype(str).str.startswith(HIGHER_ORDER)]


def _cases(trace: Trace, samples: Mapping[str, SampleFolder], selection: Selection) -> list[Case]:
    """Return the cases in the order of their first calls.

    They have no captured time, because recording the operators inside takes longer than the operators.
    """
    calls = _function_calls(trace)
    calls = calls[np.array([matches(str(name), selection.module) for name in calls["module"]], dtype=bool)]
    counts = calls["signature"].value_counts().to_dict()
    contexts = contexts_of(trace, calls)
    chosen = {
        op: _Code(trace, sample)
        for op, sample in samples.items()
        if matches(sample.name, selection.op) and not selection.excludes(sample.name)
    }
    cases = []
    for signature in trace.signatures:
        code = chosen.get(signature.op)
        if code is not None and signature.number in counts:
            context = contexts.get(signature.number, {})
            cases.append(_case(signature, code, counts[signature.number], context))
    return cases[: selection.top]


class _Code:
    """The code of a sample, loaded when a worker first needs it, since it may crash, hang or exit."""

    def __init__(self, trace: Trace, sample: SampleFolder) -> None:
        self._trace, self.sample = trace, sample

    @cached_property
    def function(self) -> Callable[..., Any]:
        return self._opened.function

    @cached_property
    def live(self) -> LiveArguments:
        return LiveArguments(self._trace, self._opened.classes)

    @cached_property
    def _opened(self) -> OpenSample:
        return open_sample(self.sample.folder)


def _case(recorded: Signature, code: _Code, calls: int, context: Mapping[str, Any]) -> Case:
    """Return the case of a recorded call, whose `load` makes its arguments and function."""
    args, kwargs = _Outline().of((recorded.args, recorded.kwargs))
    signature = replace(recorded, op=code.sample.name, args=args, kwargs=kwargs, outputs=NOT_KNOWN)
    case = Case(signature, {}, calls, 0.0, 0.0, 0.0, context=context)

    @cache
    def loaded(number: int) -> Case:
        args, kwargs = code.live.make((recorded.args, recorded.kwargs))
        runnable = function_case(code.function, args, kwargs, code.sample.name, number)
        return replace(runnable, count=calls, context=context)

    return replace(case, load=loaded)


class _Outline:
    """A converter of recorded arguments to the form in which `function_case` describes live ones.

    Objects are reduced to the name of their class.
    """

    def __init__(self) -> None:
        self._places = count()
        self._storages: dict[Any, int] = {}
        self._shared: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        match value:
            case TensorSpec():
                place = next(self._places)
                key = ("alone", place) if value.storage is None else value.storage
                storage = self._storages.setdefault(key, len(self._storages))
                return replace(value, storage=storage, values=place)
            case ObjectSpec(name) | ModuleSpec(name) | NamedSpec(name):
                return Opaque(name.rpartition(":")[2])
            case ArraySpec():
                return Opaque("ndarray")
            case ScalarSpec(_, number):
                return number
            case SharedSpec(number, inner):
                self._shared[number] = outline = self.of(inner)
                return outline
            case SameSpec(number):
                return self._shared.get(number, Opaque("object"))
            case torch.Size():
                return value
            case list() | tuple() | dict():
                return with_children(value, self.of)
        return value
