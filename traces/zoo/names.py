"""What the name of a trace's file says of it: `MODEL.RUN.jsonl.zst` is a run of a model, as in the zoo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from opgrip.traces.zoo.manifest import ZooTrace

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
