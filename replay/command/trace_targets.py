"""The traces that a command line names, their division into shards, and the folder with the rows of each trace."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from opgrip.cli.journal import LONGEST_LINE
from opgrip.cli.output_files import cannot_be_written, open_input, read_input, whole_file
from opgrip.errors import MissingFileError, UserError
from opgrip.replay.cases.sources import source_of
from opgrip.replay.command.replay_options import request_of
from opgrip.replay.reports import OutputOptions
from opgrip.replay.reports.fidelity import HERE
from opgrip.replay.results.origins import MachineColumns, Origin
from opgrip.replay.results.results import Result
from opgrip.replay.run.request import TORCH, Shard, cost_us
from opgrip.replay.run.workload import load_workload
from opgrip.replay.workers.journal import MACHINE_KIND, journal_path, unlike
from opgrip.traces.io.foreign_files import format_of
from opgrip.traces.io.shipped_traces import trace_file
from opgrip.traces.zoo import ZooTrace, patterns_in, read_manifest, select, zoo_file
from opgrip.traces.zoo.manifest import FIELD, distinct_names, name_of_file, name_of_trace

ZOO = "zoo"
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")  # file name suffixes of traces in a folder


@dataclass(frozen=True, slots=True)
class TraceTarget:
    origin: Origin
    file: str | None = None  # None for a trace of the zoo
    zoo: ZooTrace | None = None  # its file may not be installed

    def path(self) -> str:
        return str(zoo_file(self.zoo)) if self.zoo is not None else str(self.file)

    @property
    def is_installed(self) -> bool:
        try:
            self.path()
        except MissingFileError:
            return False
        return True


def targets_of(names: Sequence[str]) -> list[TraceTarget] | None:
    """Return the traces that a command line names, each once; None for a single trace or for samples."""
    if len(names) == 1 and not (_is_zoo(names[0]) or is_folder_of_traces(names[0])):
        return None
    manifest = {trace.name: trace for trace in read_manifest()}
    targets: dict[str, TraceTarget] = {}
    for name in names:
        for target in _targets(name, manifest):
            targets.setdefault(target.origin.trace if target.zoo else str(trace_file(target.path()).resolve()), target)
    return list(_with_distinct_names(list(targets.values()))) if targets else None


def args_of_one(args: argparse.Namespace, target: TraceTarget) -> argparse.Namespace:
    one = copy(args)
    one.trace = [Path(target.path())]
    return one


def is_folder_of_traces(name: str) -> bool:
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
        raise UserError(
            f"{name} is a sample, and samples cannot be listed one by one or with traces",
            "name several samples as sample:NAME,NAME, or the folder that contains them",
        )
    else:
        yield TraceTarget(Origin(*name_of_file(name, manifest)), name)


def _files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name.endswith(SUFFIXES) and file.is_file())


def _with_distinct_names(targets: Sequence[TraceTarget]) -> Iterator[TraceTarget]:
    names = distinct_names([target.origin.trace for target in targets])
    for target, name in zip(targets, names, strict=True):
        yield replace(target, origin=replace(target.origin, trace=name))


@dataclass(frozen=True, slots=True)
class TraceShare:
    shard: Shard | None  # None if the shard has no cases of the trace
    trace_hash: str | None  # None if the trace cannot be read


def deal(
    args: argparse.Namespace, targets: Sequence[TraceTarget], part: Shard, advance: Callable[[], None]
) -> dict[str, TraceShare]:
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
    one = copy(args)
    one.shard = None
    try:
        workload = load_workload(request_of(args_of_one(one, target)))
    except UserError:
        # exactly one shard replays a trace that cannot be read, and reports the error
        return 1, None
    trace_hash = source_of(workload.request.trace).fingerprint(workload.request.trace)
    return sum(cost_us(case, workload) for case in workload.cases), trace_hash


OF_TRACE = ("trace", "trace_hash", FIELD, HERE)  # header fields that differ between traces


def common_header(headers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in next(iter(headers), {}).items() if name not in OF_TRACE}


def with_traces(words: str, common: Mapping[str, Any], traces: Mapping[str, Any]) -> dict[str, Any]:
    hashes = json.dumps([hash_of(about) for about in traces.values()])
    whole = hashlib.blake2b(hashes.encode(), digest_size=16).hexdigest()
    return {"trace": words, **common, "trace_hash": whole, "traces": dict(traces)}


def with_earlier(header: Mapping[str, Any], earlier: Mapping[str, Any], replayed: Collection[str]) -> dict[str, Any]:
    facts = earlier.get("traces", {})
    new = {name: about for name, about in header["traces"].items() if name in replayed or name not in facts}
    words = dict.fromkeys(filter(None, (earlier.get("trace"), header["trace"])))
    return with_traces(" ".join(words), common_header([header]), {**facts, **new})


def hash_of(about: Any) -> str | None:
    return about.get("trace_hash") if isinstance(about, Mapping) else None


ABOUT = "about.json"  # file in the folder that describes the run
HASHES = "trace_hashes"  # key of the trace hashes in the file `ABOUT`


class OtherMachinesError(UserError):
    pass


def about_parts(
    targets: Sequence[TraceTarget], options: Mapping[str, Any], shard: object | None, machine_kind: str
) -> dict[str, Any]:
    """Return the facts that two replays of several traces must share if rows of both are to be in one table."""
    names = [target.origin.trace for target in targets]
    hashes = {name: _trace_hash(target) for name, target in zip(names, targets, strict=True)}
    about = {"traces": names, "options": dict(options), TORCH: str(torch.__version__), HASHES: hashes}
    about[MACHINE_KIND] = machine_kind
    return about if shard is None else {**about, "shard": str(shard)}


def prepare_parts(folder: Path, output: OutputOptions, about: Mapping[str, Any]) -> None:
    """Create the folder that keeps the rows of each trace, or continue with the existing one."""
    try:
        if folder.is_dir() and not output.resume:
            _remove(folder, output)
        folder.mkdir(exist_ok=True)
        if (folder / ABOUT).exists():
            _check_same(folder, about)
        with whole_file(folder / ABOUT, force=True) as file:
            file.write(json.dumps(about).encode())
    except OSError as error:
        raise cannot_be_written(folder, error) from error


def check_kinds(part: Path, rows: Iterable[Result], header: Mapping[str, Any]) -> None:
    kinds = {MachineColumns.of(row).machine_kind for row in rows} | {_kind_in_journal(part)}
    present = set(header.get("machines", {}).values())
    others = sorted(kind for kind in kinds - present if kind is not None)
    if present and others:
        words = f"{part.parent} contains rows measured on another kind of machine ({'; '.join(others)})"
        problem = f"{words} than the present one ({'; '.join(sorted(present))})"
        raise OtherMachinesError(problem, "continue with --machine-kind on such machines, or start again with --force")


def _kind_in_journal(part: Path) -> str | None:
    # the replay reports a damaged journal later
    with suppress(OSError, ValueError, RecursionError, AttributeError), open_input(journal_path(part)) as file:
        kind = json.loads(file.readline(LONGEST_LINE)).get(MACHINE_KIND)
        return kind if isinstance(kind, str) else None
    return None


def remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [ABOUT]:
            shutil.rmtree(folder)


def _trace_hash(target: TraceTarget) -> str | None:
    try:
        path = target.path()
        return source_of(path).fingerprint(path)
    except (UserError, OSError):
        # its replay reports the error later
        return None


def _remove(folder: Path, output: OutputOptions) -> None:
    if not (output.force or output.append):
        hint = "continue with --resume, or start again with --force"
        raise UserError(f"{folder} contains the rows of an interrupted replay", hint)
    if not (folder / ABOUT).is_file():
        raise UserError(f"{folder} is not the folder of an interrupted replay", "remove that folder")
    shutil.rmtree(folder)


def _check_same(folder: Path, about: Mapping[str, Any]) -> None:
    try:
        stored = json.loads(read_input(folder / ABOUT, LONGEST_LINE, "start again with --force"))
    except (ValueError, RecursionError):
        stored = None
    difference = _difference(stored, about)
    if difference is not None:
        raise UserError(
            f"{folder} contains rows {difference}", "give the arguments of that replay, or start again with --force"
        )


def _difference(stored: Any, about: Mapping[str, Any]) -> str | None:
    hashes = stored.get(HASHES) if isinstance(stored, dict) else None
    but_hashes = {**stored, HASHES: about[HASHES]} if isinstance(stored, dict) else stored
    if but_hashes != about:
        return unlike(but_hashes, about) or "of a replay of other traces or with other options"
    # a trace that could not be read has no rows
    of_rows = {name: text for name, text in hashes.items() if text is not None} if isinstance(hashes, dict) else {}
    changed = [name for name, trace_hash in of_rows.items() if trace_hash != about[HASHES].get(name)]
    return f"of a replay of different files named {', '.join(changed)}" if changed else None
