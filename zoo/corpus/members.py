"""The files that make up a corpus, and the name of the model in each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from opgrip.errors import MissingFileError, UserError
from opgrip.traces.io.archives import is_archive
from opgrip.traces.io.foreign_files import format_of, formats, is_trace
from opgrip.traces.io.shipped_traces import hint_for_missing, trace_file
from opgrip.traces.zoo import ZooTrace, patterns_in, read_manifest, select, zoo_file

ZOO = "zoo"
TRACE = "trace"  # source of opgrip traces; a file of another tool has the name of its format
MOST_FILES = 100_000  # maximum number of files read from a folder


@dataclass(frozen=True, slots=True)
class Member:
    """A trace file of a corpus.

    path : path of the file
    name : `detr_r50.train` for a trace of the zoo, otherwise the file's name
    source : `trace` for an opgrip trace, otherwise the format of another tool
    model, run, library, family : as in `ZooTrace`. If a file does not contain them, the model is the file's name and
        the others are empty. All files of a tool that stores operators in tables count as one model with the tool's
        name.
    is_named : True if the user named this file rather than a folder with it, so that failing to read it is an error
    """

    path: Path
    name: str
    source: str = TRACE
    model: str = ""
    run: str = ""
    library: str = ""
    family: str = ""
    is_named: bool = True

    @property
    def is_trace(self) -> bool:
        """Return True if the file is a trace that opgrip recorded, False if it was converted from another tool's
        file.
        """
        return self.source == TRACE

    def described_by(self, header: Mapping[str, Any]) -> Member:
        """Return the member with source, model, run, library and family taken from the file's header.

        A member whose model is already known is returned unchanged.
        """
        if self.model:
            return self
        source = _text(header.get("converted_from")) or TRACE
        format_ = formats.get(source)
        if format_ is not None and format_.is_collection:
            return replace(self, source=source, model=source, library=source)
        about = header.get("model")
        about = about if isinstance(about, dict) else {}
        packages = about.get("packages")
        library = next(reversed(packages), "") if isinstance(packages, dict) and packages else ""
        return replace(
            self,
            source=source,
            model=_text(about.get("name")) or _stem(self.path),
            run=_text(about.get("run")),
            library=_text(library),
        )


@dataclass(frozen=True, slots=True)
class Members:
    """The trace files of a corpus, and what was left out.

    members : the files
    passed_over : files in the given folders whose format is unknown
    absent : names of selected traces of the zoo that are not installed
    """

    members: Sequence[Member]
    passed_over: Sequence[Path] = ()
    absent: Sequence[str] = ()


def is_several(name: str) -> bool:
    """Return True if an argument of a command means several files: `zoo`, `zoo:PATTERN`, or a folder of files."""
    if _is_zoo(name):
        return True
    path = Path(name)
    return path.is_dir() and format_of(path) is None


def _is_zoo(name: str) -> bool:
    return (name == ZOO or name.startswith(f"{ZOO}:")) and not _is_file(name)


def _is_file(name: str) -> bool:
    """Return True if the path exists; False also if the name is too long for a file, where `Path.exists` raises
    an error.
    """
    try:
        return Path(name).exists()
    except OSError:
        return False


def members_of(inputs: Iterable[str]) -> Members:
    """Return the files that the arguments of a command select.

    inputs : traces, files of other tools, folders of such files, `zoo`, or `zoo:PATTERN`

    Raises UserError if a file does not exist, a pattern matches nothing, or no file is found.
    """
    members: dict[Path, Member] = {}
    passed_over: list[Path] = []
    absent: list[str] = []
    for name in inputs:
        if _is_zoo(name):
            named_members, missing = _of_zoo(name.partition(":")[2])
            absent += missing
        elif (path := trace_file(name)).is_dir() and format_of(path) is None:
            named_members, others = _of_folder(path)
            passed_over += others
        else:
            named_members = [_of_file(path, is_named=True)]
        members.update((member.path.resolve(), member) for member in named_members)
    return Members(list(members.values()), passed_over, absent)


def _of_zoo(pattern: str) -> tuple[list[Member], list[str]]:
    """Return the installed traces of the zoo whose name matches a pattern, and the names of matching ones not
    installed.
    """
    traces = select(patterns_in(pattern), read_manifest())
    members = [member for trace in traces if (member := _of_zoo_trace(trace)) is not None]
    if not members:
        # raises an error that explains how to install it
        zoo_file(traces[0])
    present = {member.name for member in members}
    return members, [trace.name for trace in traces if trace.name not in present]


def _of_zoo_trace(trace: ZooTrace) -> Member | None:
    try:
        path = zoo_file(trace)
    except MissingFileError:
        return None
    return Member(path, trace.name, TRACE, trace.model, trace.run, trace.library, trace.family)


def _of_folder(folder: Path) -> tuple[list[Member], list[Path]]:
    paths = sorted(path for path in islice(folder.rglob("*"), MOST_FILES) if path.is_file())
    members, others = [], []
    for path in paths:
        if _is_readable(path):
            members.append(_of_file(path, is_named=False))
        else:
            others.append(path)
    if not members:
        raise UserError(f"{folder} contains no trace", "choose a folder of traces, or capture one with opcapture")
    return members, others


def _is_readable(path: Path) -> bool:
    try:
        return is_archive(path) or is_trace(path) or format_of(path) is not None
    except (UserError, OSError):
        return False


def _of_file(path: Path, is_named: bool) -> Member:
    if not path.exists():
        what = f"{path} does not exist{hint_for_missing(path)}"
        raise MissingFileError(what, f"name a trace, a folder of traces, or {ZOO}")
    return Member(path, path.name, is_named=is_named)


def _stem(path: Path) -> str:
    return path.name.partition(".")[0] or path.name


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
