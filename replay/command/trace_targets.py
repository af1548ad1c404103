"""The traces that a command line names (the zoo, patterns of it, a folder, files), and their shards."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

from opgrip.errors import UserError
from opgrip.replay.cases.sources import source_of
from opgrip.replay.replay_options import request_of
from opgrip.replay.results.origins import Origin
from opgrip.replay.run.request import Shard, cost_us
from opgrip.replay.run.workload import load_workload
from opgrip.traces.io.foreign_files import format_of
from opgrip.traces.io.shipped_traces import trace_file
from opgrip.traces.zoo import ZooTrace, patterns_in, read_manifest, select, zoo_file
from opgrip.traces.zoo.manifest import name_of_file, name_of_trace, told_apart

ZOO = "zoo"
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
"""file name suffixes of traces in a folder"""


@dataclass(frozen=True, slots=True)
class TraceTarget:
    """One of several traces.

    file : path of the trace, or None for a trace of the zoo
    zoo : entry in the zoo, whose file may not be installed
    """

    origin: Origin
    file: str | None = None
    zoo: ZooTrace | None = None

    def path(self) -> str:
        """Return the path of the trace.

        Raises `MissingFileError` if it is a trace of the zoo that is not installed.
        """
        return str(zoo_file(self.zoo)) if self.zoo is not None else str(self.file)


def targets_of(names: Sequence[str]) -> list[TraceTarget] | None:
    """Return the traces that the names refer to, without duplicates, or None for a single trace or sample.

    Raises `UserError` if a pattern matches no trace of the zoo, or one of several names is not a trace.
    """
    if len(names) == 1 and not (_is_zoo(names[0]) or is_folder_of_traces(names[0])):
        return None
    manifest = {trace.name: trace for trace in read_manifest()}
    targets: dict[str, TraceTarget] = {}
    for name in names:
        for target in _targets(name, manifest):
            targets.setdefault(target.origin.trace if target.zoo else str(trace_file(target.path()).resolve()), target)
    return list(_with_distinct_names(list(targets.values()))) if targets else None


def args_of_one(args: argparse.Namespace, target: TraceTarget) -> argparse.Namespace:
    """Return the command line that replays one of several traces.

    Raises `UserError` if it is a trace of the zoo that is not installed.
    """
    one = copy(args)
    one.trace = [Path(target.path())]
    return one


def is_folder_of_traces(name: str) -> bool:
    """Return True if a folder contains traces and no Python files, which a gripped sample has."""
    folder = Path(name)
    return folder.is_dir() and format_of(folder) is None and bool(_files_in(folder)) and not any(folder.glob("*.py"))


def _is_zoo(name: str) -> bool:
    # a folder named `zoo` may be anything, such as a package
    is_own = Path(name).is_file() or is_folder_of_traces(name)
    return name.startswith(f"{ZOO}:") or (name == ZOO and not is_own)


def _targets(name: str, manifest: dict[str, ZooTrace]) -> Iterator[TraceTarget]:
    if _is_zoo(name):
        for trace in select(patterns_in(name.partition(":")[2]), list(manifest.values())):
            yield TraceTarget(Origin(*name_of_trace(trace)), zoo=trace)
    elif is_folder_of_traces(name):
        for file in _files_in(Path(name)):
            yield TraceTarget(Origin(*name_of_file(file, manifest)), str(file))
    elif name.startswith("sample:") or (Path(name).is_dir() and format_of(Path(name)) is None):
        raise UserError(f"{name} is not a trace", "replay samples separately from several traces")
    else:
        yield TraceTarget(Origin(*name_of_file(name, manifest)), name)


def _files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name.endswith(SUFFIXES) and file.is_file())


def _with_distinct_names(targets: Sequence[TraceTarget]) -> Iterator[TraceTarget]:
    """Yield the targets with repeated names made distinct."""
    names = told_apart([target.origin.trace for target in targets])
    for target, name in zip(targets, names, strict=True):
        yield replace(target, origin=replace(target.origin, trace=name))


@dataclass(frozen=True, slots=True)
class TraceShare:
    """A shard's part of a trace.

    shard : part of this trace, or None if the shard has no cases of it
    trace_hash : hash of the whole trace, which all shards put into their headers; None if it cannot be read
    """

    shard: Shard | None
    trace_hash: str | None


def deal(
    args: argparse.Namespace, targets: Sequence[TraceTarget], part: Shard, advance: Callable[[], None]
) -> dict[str, TraceShare]:
    """Return a shard's part of each trace, by trace name.

    Every trace is read, so that all shards agree on its cost.

    part : the shard
    advance : called after each trace
    """
    costs: list[tuple[str, int, str | None]] = []
    for target in targets:
        costs.append((target.origin.trace, *_cost(args, target)))
        advance()
    total_us, offset_us = sum(cost for _, cost, _ in costs), 0
    shares = {}
    for name, cost, trace_hash in costs:
        own = replace(part, offset_us=offset_us, total_us=total_us)
        shares[name] = TraceShare(own if own.has_part_of(cost) else None, trace_hash)
        offset_us += cost
    return shares


def _cost(args: argparse.Namespace, target: TraceTarget) -> tuple[int, str | None]:
    """Return the cost of a trace and its hash.

    A trace that cannot be read costs 1, so that exactly one shard replays it and reports the error.
    """
    one = copy(args)
    one.shard = None
    try:
        workload = load_workload(request_of(args_of_one(one, target)))
    except UserError:
        return 1, None
    trace_hash = source_of(workload.request.trace).fingerprint(workload.request.trace)
    return sum(cost_us(case, workload) for case in workload.cases), trace_hash
