"""The zoo's manifest `traces/zoo.json`, the trace files of the zoo, and their names."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from opgrip.cli.command import did_you_mean
from opgrip.errors import MissingFileError, UserError

MANIFEST = Path(__file__).parent.parent / "zoo.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Recording:
    versions: Mapping[str, str]
    machine: str
    steps: int
    step_ms: float
    calls: int
    signatures: int
    operators: int
    longtail: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ZooTrace:
    """A trace of the zoo: one model in one kind of run.

    model : short name, shared by all runs of a model, such as `faster-rcnn_r50`
    run : kind of step: `predict`, `train` or `generate`, followed by the dtype if it is not float32: `train-bfloat16`
    remark : differences from the model's config and their reasons; may be empty
    """

    model: str
    run: str
    library: str
    family: str
    arguments: Sequence[str]
    inputs: str = ""
    remark: str = ""
    recording: Recording | None = field(default=None)

    @property
    def name(self) -> str:
        return f"{self.model}.{self.run}"


def read_manifest(path: Path = MANIFEST) -> list[ZooTrace]:
    data = json.loads(path.read_text(encoding="utf-8"))
    recordings = [item.pop("recording", None) for item in data["traces"]]
    return [
        ZooTrace(**item, recording=None if recording is None else Recording(**recording))
        for item, recording in zip(data["traces"], recordings, strict=True)
    ]


def patterns_in(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def select(patterns: Sequence[str], traces: Sequence[ZooTrace]) -> list[ZooTrace]:
    """Return the traces whose name, model, library or family matches a shell pattern; without patterns, all traces."""
    selected = {trace.name: trace for trace in traces if not patterns}
    for pattern in patterns:
        matching = [trace for trace in traces if _matches(trace, pattern)]
        if not matching:
            names = {word for trace in traces for word in (trace.name, trace.model, trace.library, trace.family)}
            hint = did_you_mean(pattern, names, "see opgrip zoo list")
            if any(name.startswith(pattern) for name in names):
                hint = f"did you mean '{pattern}*'?"
            raise UserError(f"no trace of the zoo matches {pattern!r}", hint)
        selected.update((trace.name, trace) for trace in matching)
    return list(selected.values())


def _matches(trace: ZooTrace, pattern: str) -> bool:
    words = (trace.name, trace.model, trace.library, trace.family)
    return any(fnmatch.fnmatchcase(word, pattern) for word in words)


PREFIXES = ("trace:", "zoo:")  # prefixes of shipped traces, which are accepted in place of file names


class TraceName(NamedTuple):
    name: str
    model: str
    run: str = ""
    library: str = ""
    family: str = ""


def name_of_trace(trace: ZooTrace) -> TraceName:
    return TraceName(trace.name, trace.model, trace.run, trace.library, trace.family)


def name_of_file(path: str | Path, manifest: Mapping[str, ZooTrace]) -> TraceName:
    name = Path(path).name
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    for suffix in (".gz", ".zst", ".jsonl", ".json"):
        name = name.removesuffix(suffix)
    if name in manifest:
        return name_of_trace(manifest[name])
    model, _, run = name.rpartition(".")
    return TraceName(name, model, run) if model else TraceName(name, name)


def distinct_names(names: Sequence[str]) -> list[str]:
    counts: Counter[str] = Counter()
    used = set(names)
    distinct = []
    for name in names:
        counts[name] += 1
        number, own = counts[name], name
        while number > 1 and own in used:
            own, number = f"{name}~{number}", number + 1
        used.add(own)
        distinct.append(own)
    return distinct


MODELS = Path(__file__).parent / "models"
PREFIX = "zoo:"  # prefix of a zoo trace, which is accepted in place of a file name
SUFFIX = ".jsonl.zst"
PACKAGE = "opgrip_zoo"
# hint for a trace that is not installed
INSTALL = "install the package opgrip-zoo (pip install ./traces/zoo/models in a checkout), or run opgrip zoo make NAME"


def zoo_file(trace: ZooTrace) -> Path:
    for folder in _folders():
        file = folder / f"{trace.name}{SUFFIX}"
        if file.is_file():
            return file
    raise MissingFileError(f"the trace {trace.name} of the zoo is not installed", INSTALL)


def _folders() -> Iterator[Path]:
    yield MODELS
    package = importlib.util.find_spec(PACKAGE)
    for folder in (package and package.submodule_search_locations) or ():
        yield Path(folder)


FIELD = "distilled"  # header field of a distilled trace; readers that do not know it ignore it


def chosen_numbers(header: Mapping[str, Any]) -> range | None:
    """Return the numbers of the cases' signatures in a distilled trace (a few cases that represent many traces)."""
    field = header.get(FIELD)
    keys = field.get("keys") if isinstance(field, dict) else None
    return range(len(keys)) if isinstance(keys, list) else None
