"""Sources of sample cases: shipped samples, the user's samples in folders, and gripped calls of a trace."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from hashlib import blake2b
from itertools import count, islice
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from opgrip.cli.command import counted, did_you_mean, nearest
from opgrip.cli.option_types import matches
from opgrip.cli.output_files import open_input
from opgrip.errors import UserError
from opgrip.replay.cases.cases import Case, contexts_of
from opgrip.replay.cases.functions import NOT_KNOWN, FunctionOperator, TensorValues, described_case, function_case
from opgrip.replay.cases.selection import ALL_EXCLUDED, Selection, no_match
from opgrip.replay.cases.sources import CaseSet, sources
from opgrip.replay.operators.lookup import Operator
from opgrip.replay.operators.memory import tensors_in
from opgrip.samples import Sample, Tag, samples, tag_of
from opgrip.traces import Trace, load
from opgrip.traces.io.foreign_files import format_of
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
    """Return the sample folders at a path: the folder itself if it is one, or its subfolders that are."""
    if (target / SAMPLE).is_file():
        return [target]
    return sorted(path.parent for path in target.glob(f"*/{SAMPLE}"))


def read_folders(targets: Sequence[Path]) -> list[SampleFolder]:
    samples = []
    for target in targets:
        folders = folders_in(target)
        if not folders:
            raise UserError(f"{target} contains no sample", "name a folder that opgrip grip or opcapture --grip wrote")
        samples += [read_sample(folder) for folder in folders]
    return samples


def gripped_samples(folders: Sequence[Path], patterns: Sequence[str] = (), tags: Sequence[str] = ()) -> Iterator[Case]:
    requested_tags = {tag.lower() for tag in tags}
    for sample in map(read_sample, folders):
        if matches(sample.name, patterns) and requested_tags <= {tag.lower() for tag in sample.tags}:
            # absolute, because values are read after the sample's code has run, which may change the working directory
            trace = load((sample.folder / CALLS).absolute(), partial=False, unbounded=True)
            yield from _cases(trace, {sample.name: sample}, Selection())


def gripped_calls(trace: Trace, selection: Selection, folders: Sequence[Path]) -> list[Case]:
    samples = {sample.origin: sample for sample in read_folders(folders)}
    names = _function_calls(trace)["op"]
    if names.empty:
        raise UserError("the trace contains no gripped calls", "capture it with opcapture --grip")
    cases = _cases(trace, samples, selection)
    if not cases:
        raise no_match(names, list(samples), "--samples ")
    return cases


def add_content(digest: blake2b, path: Path) -> None:
    with open_input(path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)


def hash_of(folder: Path) -> bytes:
    digest = blake2b(digest_size=16)
    for path in sorted([*folder.glob("*.py"), folder / CALLS]):
        add_content(digest, path)
    return digest.digest()


def _function_calls(trace: Trace) -> pd.DataFrame:
    calls = trace.calls[trace.calls["kind"] == FUNCTION]
    return calls[~calls["op"].astype(str).str.startswith(HIGHER_ORDER)]


def _cases(trace: Trace, samples: Mapping[str, SampleFolder], selection: Selection) -> list[Case]:
    calls = _function_calls(trace)
    places = zip(calls["module"], calls["phase"], strict=True)
    is_selected = [matches(str(one), selection.module) and matches(phase, selection.phase) for one, phase in places]
    calls = calls[np.array(is_selected, dtype=bool)]
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
    def __init__(self) -> None:
        self._places = count()
        self._storages: dict[Any, int] = {}
        self._shared: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        match value:
            case TensorSpec():
                index = next(self._places)
                key = ("alone", index) if value.storage is None else value.storage
                storage = self._storages.setdefault(key, len(self._storages))
                return replace(value, storage=storage, values=index)
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


class SampleSource:
    """The source of cases for `samples`, `sample:NAME`, and folders that `opgrip grip` wrote."""

    lacks: Sequence[str] = ("traces",)
    hint = "leave it out with samples"
    place = 100
    in_program = False

    def takes(self, target: str) -> bool:
        return names_samples(target)

    def open(self, target: str, selection: Selection, extensions: Collection[str]) -> CaseSet:
        if selection.samples:
            raise UserError("--samples is for gripped calls of a trace", "give a trace, and --unit function")
        cases = [case for case in sample_cases(target, selection.op, selection.tag) if not selection.excludes(case.op)]
        if not cases:
            raise UserError(*ALL_EXCLUDED)
        # inputs of shipped samples are made in this process; code of gripped samples is loaded in a worker
        has_run_code = any(case.load is None for case in cases)
        return CaseSet(cases[: selection.top], has_run_code=has_run_code)

    def fingerprint(self, target: str) -> str:
        return fingerprint(target)


sources.register("samples")(SampleSource())


JOINED = "; opgrip trace merge joins several"
LOOKED_AT = 20  # maximum number of files in a folder that are examined to find a trace
PREFIX = "sample:"  # prefix of targets that always mean a shipped sample, even if a folder has its name: `sample:nms`


def names_samples(target: str) -> bool:
    """Return True if a target means samples: `samples`, `sample:nms`, `samples/nms`, or a folder that is no trace."""
    if target.startswith(PREFIX) or PurePath(target).parts[:1] == (SHIPPED,):
        return True
    # some formats of other tools are folders
    return Path(target).is_dir() and format_of(Path(target)) is None


def sample_cases(target: str, patterns: Sequence[str] = (), tags: Sequence[str] = ()) -> list[Case]:
    folders, name = _folders(target), _shipped_name(target)
    if folders and PurePath(target).parts[:1] == (SHIPPED,):
        warnings.warn(_note(target, len(folders)), stacklevel=2)
    shipped = [] if name is None else find_samples(name, patterns, tags)
    cases = [shipped_case(sample, configuration) for sample in shipped for configuration in sample.configurations]
    cases += gripped_samples(folders, patterns, tags)
    if not cases:
        raise _nothing_selected(target, patterns, tags)
    return [replace(case, signature=replace(case.signature, number=number)) for number, case in enumerate(cases)]


def _nothing_selected(target: str, patterns: Sequence[str], tags: Sequence[str]) -> UserError:
    folder = Path(target)
    shipped = _shipped_name(target)
    names = [folder.name for folder in _folders(target)]
    names += [] if shipped is None else [sample.name for sample in samples_named(shipped)]
    if not names:
        trace = _trace_in(folder)
        example = "" if trace is None else f", such as {trace}"
        hint = f"name a trace{example}, or a folder that opgrip grip wrote"
        return UserError(f"{target} is a folder without samples", hint + (JOINED if trace is not None else ""))
    if not patterns and not tags:
        hint = f"name a folder that opgrip grip wrote, or replay {_folders(target)[0] / CALLS} as a trace"
        return UserError(f"{target} contains no sample with recorded calls", hint)
    if not any(matches(name, patterns) for name in names):
        near = ", ".join(nearest(patterns[0], names))
        return UserError(f"no sample matches --op {' '.join(patterns)}", f"similar names in {target} are {near}")
    return UserError(f"{target} contains no sample with these names and tags", "opgrip samples list shows all")


def _trace_in(folder: Path) -> Path | None:
    files = [path for path in islice(sorted(folder.iterdir()), LOOKED_AT) if path.is_file()]
    for path in files:
        with suppress(UserError):
            if ".jsonl" in path.suffixes or format_of(path) is not None:
                return path
    return None


def fingerprint(target: str) -> str:
    digest = blake2b(digest_size=16)
    for folder in _folders(target):
        digest.update(hash_of(folder))
    name = _shipped_name(target)
    for sample in () if name is None else samples_named(name):
        digest.update(inspect.getsource(sys.modules[sample.function.__module__]).encode())
    return digest.hexdigest()


def _folders(target: str) -> list[Path]:
    return [] if target.startswith(PREFIX) else folders_in(Path(target))


def _shipped_name(target: str) -> str | None:
    if target.startswith(PREFIX):
        return target.removeprefix(PREFIX)
    first, *others = PurePath(target).parts or ("",)
    if first != SHIPPED or (others and _folders(target)):
        return None
    return "/".join(others)


def _note(target: str, count: int) -> str:
    name = "/".join(PurePath(target).parts[1:])
    if not name:
        count_text = counted(count, "sample")
        return f"the local folder {target} contains {count_text}, which run in addition to the package's samples"
    hidden = f"; the shipped sample of that name is {PREFIX}{name}" if name in samples() else ""
    return f"{target} is read as the local folder{hidden}"


SHIPPED = "samples"  # target that means all shipped samples


@dataclass(frozen=True, slots=True)
class ConfigurationTensor:
    name: str
    configuration: str
    place: int

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        return TensorValues(_tensors(self.name, self.configuration)[self.place]).draw(shape, dtype, generator)


def find_samples(name: str = "", patterns: Sequence[str] = (), tags: Sequence[str] = ()) -> list[Sample]:
    requested_tags = set(map(_tag, tags))
    return [
        sample for sample in samples_named(name) if matches(sample.name, patterns) and requested_tags <= sample.tags
    ]


def samples_named(names: str) -> list[Sample]:
    if not names:
        return list(samples().values())
    for name in names.split(","):
        if name not in samples():
            raise UserError(f"unknown sample {name!r}", did_you_mean(name, samples(), "opgrip samples list shows all"))
    return [samples()[name] for name in dict.fromkeys(names.split(","))]


def _tag(word: str) -> Tag:
    try:
        return tag_of(word)
    except ValueError as error:
        names = [tag.value for tag in Tag]
        raise UserError(str(error), did_you_mean(word, names, f"choose from {', '.join(names)}")) from error


def shipped_case(sample: Sample, configuration: str) -> Case:
    arguments = sample.arguments(configuration)
    drawables = {
        index: ConfigurationTensor(sample.name, configuration, index) for index in range(len(tensors_in(arguments)))
    }
    # the tag makes a trial run to detect writes unnecessary
    may_write = Tag.IN_PLACE in sample.tags
    function = sample.function
    operator = FunctionOperator(function, (arguments, {})) if may_write else Operator(function, mutates=False)
    return described_case(operator, (arguments, {}), drawables, sample.name, 0)


@lru_cache(maxsize=1)
def _tensors(name: str, configuration: str) -> list[Tensor]:
    arguments: Any = samples()[name].arguments(configuration)
    return [tensor.detach() for tensor in tensors_in(arguments)]
