"""The manifest of the zoo, `traces/zoo.json`, the files of its traces, and what names and headers of traces say."""

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
    """What a trace held when it was recorded.

    Attributes
    ----------
    versions : by package: torch, opgrip and those that the model is of
    machine : the device that its times are of
    steps : recorded ones
    step_ms : median time of a step, unwatched
    operators : distinct operators and extension functions
    longtail : distinct functions that the finder of long-tail functions names
    size_bytes, sha256 : of the file
    """

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
    """One model under one way to run it.

    Attributes
    ----------
    model : short name, the same for all runs of a model: `faster-rcnn_r50`
    run : what a step is: `predict`, `train`, `generate`; with a dtype after it where that is not float32:
        `train-bfloat16`
    library : whose model it is: `mmdet`, `mmseg`, `transformers`, `opgrip`
    family : the kind of model: `two-stage`, `encoder`, `diffusion`
    arguments : of `opcapture`, which make it again
    inputs : in words: `1 image of 800x1333`
    remark : what is not as in its config, and why; may be empty
    recording : what the file held; None where it has not been made yet
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
        """`MODEL.RUN`, its name on the command line and that of its file."""
        return f"{self.model}.{self.run}"


def read_manifest(path: Path = MANIFEST) -> list[ZooTrace]:
    """The traces of a manifest, in its order."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return [_trace(item) for item in data["traces"]]


def patterns_in(text: str) -> list[str]:
    """What follows `zoo:` in a name: patterns with commas between them."""
    return [part for part in text.split(",") if part]


def select(patterns: Sequence[str], traces: Sequence[ZooTrace]) -> list[ZooTrace]:
    """Those whose name, model, library or family a pattern with wildcards matches; all where there is no pattern.

    Raises
    ------
    UserError : for a pattern that matches none
    """
    selected = {trace.name: trace for trace in traces if not patterns}
    for pattern in patterns:
        matching = [trace for trace in traces if _matches(trace, pattern)]
        if not matching:
            names = {word for trace in traces for word in (trace.name, trace.model, trace.library, trace.family)}
            hint = did_you_mean(pattern, names, "see opgrip zoo list")
            if any(name.startswith(pattern) for name in names):
                hint = f"did you mean '{pattern}*'?"
            raise UserError(f"no trace of the zoo is {pattern!r}", hint)
        selected.update((trace.name, trace) for trace in matching)
    return list(selected.values())


def _matches(trace: ZooTrace, pattern: str) -> bool:
    words = (trace.name, trace.model, trace.library, trace.family)
    return any(fnmatch.fnmatchcase(word, pattern) for word in words)


def _trace(item: Mapping[str, Any]) -> ZooTrace:
    recording = item.get("recording")
    return ZooTrace(**{**item, "recording": None if recording is None else Recording(**recording)})


PREFIXES = ("trace:", "zoo:")
"""Of traces that ship, where a file of a trace can be."""


class TraceName(NamedTuple):
    """A trace's name, without the suffixes of its file, and what it says; as `ZooTrace` has it."""

    name: str
    model: str
    run: str = ""
    library: str = ""
    family: str = ""


def name_of_trace(trace: ZooTrace) -> TraceName:
    """Of one of the zoo."""
    return TraceName(trace.name, trace.model, trace.run, trace.library, trace.family)


def name_of_file(path: str | Path, manifest: Mapping[str, ZooTrace]) -> TraceName:
    """Of a file; one that is called as a trace of the zoo is of that model.

    Parameters
    ----------
    manifest : the traces of the zoo by their names
    """
    name = Path(path).name
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    for suffix in (".gz", ".zst", ".jsonl", ".json"):
        name = name.removesuffix(suffix)
    if name in manifest:
        return name_of_trace(manifest[name])
    model, _, run = name.rpartition(".")
    return TraceName(name, model, run) if model else TraceName(name, name)


def told_apart(names: Sequence[str]) -> list[str]:
    """The same names, those that are alike told apart by a number."""
    seen: Counter[str] = Counter()
    taken = set(names)
    distinct = []
    for name in names:
        seen[name] += 1
        number, own = seen[name], name
        while number > 1 and own in taken:
            own, number = f"{name}~{number}", number + 1
        taken.add(own)
        distinct.append(own)
    return distinct


MODELS = Path(__file__).parent / "models"
PREFIX = "zoo:"
"""What the name of a trace begins with where a file can be."""
SUFFIX = ".jsonl.zst"
PACKAGE = "opgrip_zoo"


def zoo_file(trace: ZooTrace) -> Path:
    """The file of a trace.

    Raises
    ------
    MissingFileError : where it is not installed
    """
    for folder in _folders():
        file = folder / f"{trace.name}{SUFFIX}"
        if file.is_file():
            return file
    raise MissingFileError(
        f"the trace {trace.name} of the zoo is not installed",
        "install the package opgrip-zoo (docs/zoo.md), or opgrip zoo make " + trace.name,
    )


def _folders() -> Iterator[Path]:
    yield MODELS
    package = importlib.util.find_spec(PACKAGE)
    for folder in (package and package.submodule_search_locations) or ():
        yield Path(folder)


FIELD = "distilled"
"""Field of the header of a distilled trace. Readers that do not know it ignore it."""


def chosen_numbers(header: Mapping[str, Any]) -> range | None:
    """Return the numbers of the signatures that a distilled trace is of, or None if it is not distilled.

    Other signatures of such a trace are of calls that precede these.
    """
    field = header.get(FIELD)
    keys = field.get("keys") if isinstance(field, dict) else None
    return range(len(keys)) if isinstance(keys, list) else None
