"""The folder next to an output that keeps the rows of each of several traces, and their common header."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from opgrip.cli.output_files import cannot_be_written, whole_file
from opgrip.errors import UserError
from opgrip.replay.cases.sources import source_of
from opgrip.replay.command.trace_targets import TraceTarget
from opgrip.replay.replay_options import OutputOptions
from opgrip.replay.results.origins import MachineColumns
from opgrip.replay.results.results import Result
from opgrip.replay.run.request import TORCH
from opgrip.replay.workers.journal import MACHINE_KIND, journal_path, unlike
from opgrip.traces.zoo.manifest import FIELD

OF_TRACE = ("trace", "trace_hash", FIELD)
"""Parts of a header that each trace has of its own."""


def common_header(headers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the results of all traces have in common, as the first of them says it."""
    return {name: value for name, value in next(iter(headers), {}).items() if name not in OF_TRACE}


def with_traces(words: str, common: Mapping[str, Any], traces: Mapping[str, Any]) -> dict[str, Any]:
    """The header of several traces.

    Parameters
    ----------
    words : that name the traces
    traces : by the name of a trace, what it is
    """
    hashes = json.dumps([hash_of(about) for about in traces.values()])
    whole = hashlib.blake2b(hashes.encode(), digest_size=16).hexdigest()
    return {"trace": words, **common, "trace_hash": whole, "traces": dict(traces)}


def with_earlier(header: Mapping[str, Any], earlier: Mapping[str, Any], replayed: Collection[str]) -> dict[str, Any]:
    """The header of rows that are added to those of a file.

    Parameters
    ----------
    earlier : the header of that file
    replayed : the traces whose rows are added; of others, what the file says of them stays
    """
    facts = earlier.get("traces", {})
    new = {name: about for name, about in header["traces"].items() if name in replayed or name not in facts}
    words = dict.fromkeys(filter(None, (earlier.get("trace"), header["trace"])))
    return with_traces(" ".join(words), common_header([header]), {**facts, **new})


def hash_of(about: Any) -> str | None:
    """The hash of a trace, of what a header says of it, which may be a stranger's."""
    return about.get("trace_hash") if isinstance(about, Mapping) else None


ABOUT = "about.json"
"""The file in the folder that says what its rows are of."""
HASHES = "trace_hashes"
"""What it says of the files."""


class OtherMachinesError(UserError):
    """Rows of machines of another kind than those that are there, beside which none can be put."""


def about_parts(
    targets: Sequence[TraceTarget], options: Mapping[str, Any], shard: object | None, machine_kind: str
) -> dict[str, Any]:
    """What the rows of several traces must have in common to stand in one table, in plain values."""
    names = [target.origin.trace for target in targets]
    hashes = {name: _trace_hash(target) for name, target in zip(names, targets, strict=True)}
    about = {"traces": names, "options": dict(options), TORCH: str(torch.__version__), HASHES: hashes}
    about[MACHINE_KIND] = machine_kind
    return about if shard is None else {**about, "shard": str(shard)}


def prepare_parts(folder: Path, output: OutputOptions, about: Mapping[str, Any]) -> None:
    """Make the folder, or see that it is of the same run.

    Raises
    ------
    UserError : where it holds rows that are not to be gone on with, or of other traces, options or versions, or cannot
        be written
    """
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
    """Raise `OtherMachinesError` where what is kept of a trace is of other machines than cases would run on now.

    Parameters
    ----------
    part : the file of the trace
    rows : that it has; none where they are in its journal
    header : of the results that would be written now, which names the machines
    """
    kinds = {MachineColumns.of(row).machine_kind for row in rows} | {_kind_in_journal(part)}
    present = set(header.get("machines", {}).values())
    others = sorted(kind for kind in kinds - present if kind is not None)
    if present and others:
        words = f"{part.parent} has rows of machines of another kind ({'; '.join(others)})"
        problem = f"{words} than there are now ({'; '.join(sorted(present))})"
        raise OtherMachinesError(problem, "go on with --machine-kind where such are, or begin anew with --force")


def _kind_in_journal(part: Path) -> str | None:
    """What the first line of a journal says; None where there is none, or it is damaged, which the replay will say."""
    with suppress(OSError, ValueError, RecursionError, AttributeError), journal_path(part).open("rb") as file:
        kind = json.loads(file.readline()).get(MACHINE_KIND)
        return kind if isinstance(kind, str) else None
    return None


def remove_if_empty(folder: Path) -> None:
    """Remove a folder that has no rows to go on with."""
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [ABOUT]:
            shutil.rmtree(folder)


def _trace_hash(target: TraceTarget) -> str | None:
    """None where it cannot be read, which its replay will say."""
    try:
        path = target.path()
        return source_of(path).fingerprint(path)
    except (UserError, OSError):
        return None


def _remove(folder: Path, output: OutputOptions) -> None:
    if not (output.force or output.append):
        hint = "go on with --resume, or begin anew with --force"
        raise UserError(f"{folder} holds the rows of an interrupted replay", hint)
    if not (folder / ABOUT).is_file():
        raise UserError(f"{folder} is no folder of an interrupted replay", "remove it")
    shutil.rmtree(folder)


def _check_same(folder: Path, about: Mapping[str, Any]) -> None:
    try:
        stored = json.loads((folder / ABOUT).read_bytes())
    except (ValueError, RecursionError):
        stored = None
    difference = _difference(stored, about)
    if difference is not None:
        raise UserError(f"{folder} is {difference}", "give the same, or begin anew with --force")


def _difference(stored: Any, about: Mapping[str, Any]) -> str | None:
    """What the rows there are of that these would not be."""
    hashes = stored.get(HASHES) if isinstance(stored, dict) else None
    but_hashes = {**stored, HASHES: about[HASHES]} if isinstance(stored, dict) else stored
    if but_hashes != about:
        return unlike(but_hashes, about) or "of other traces or with other options"
    # there are no rows of a trace that could not be read
    of_rows = {name: text for name, text in hashes.items() if text is not None} if isinstance(hashes, dict) else {}
    changed = [name for name, trace_hash in of_rows.items() if trace_hash != about[HASHES].get(name)]
    return f"of other files of {', '.join(changed)}" if changed else None
