"""A corpus: many traces as one table of signatures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import pandas as pd

from opgrip.cli.command import counted, printable
from opgrip.errors import MissingFileError, UserError, shortened
from opgrip.replay.cases.cases import contexts_of
from opgrip.traces.analysis.differences import call_outline
from opgrip.traces.codec.record_forms import key_of_case
from opgrip.traces.io.archives import is_archive
from opgrip.traces.io.foreign_files import format_of, formats, is_trace
from opgrip.traces.io.shipped_traces import hint_for_missing, trace_file
from opgrip.traces.schema.arguments import TensorSpec, tensors
from opgrip.traces.schema.records import Signature
from opgrip.traces.schema.tensor_specs import plain_name
from opgrip.traces.table.trace import Trace, load
from opgrip.traces.zoo import ZooTrace, patterns_in, read_manifest, select, zoo_file

ZOO = "zoo"
TRACE = "trace"  # source of opgrip traces; a file of another tool has the name of its format
MOST_FILES = 100_000  # maximum number of files read from a folder


@dataclass(frozen=True, slots=True)
class Member:
    """A trace file of a corpus.

    name : `detr_r50.train` for a trace of the zoo, otherwise the file's name
    source : `trace` for an opgrip trace, otherwise the format of another tool
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
        return self.source == TRACE

    def described_by(self, header: Mapping[str, Any]) -> Member:
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
            model=_text(about.get("name")) or self.path.name.partition(".")[0] or self.path.name,
            run=_text(about.get("run")),
            library=_text(library),
        )


@dataclass(frozen=True, slots=True)
class Members:
    members: Sequence[Member]
    passed_over: Sequence[Path] = ()
    absent: Sequence[str] = ()


def is_several(name: str) -> bool:
    if _is_zoo(name):
        return True
    path = Path(name)
    return path.is_dir() and format_of(path) is None


def _is_zoo(name: str) -> bool:
    return (name == ZOO or name.startswith(f"{ZOO}:")) and not _is_file(name)


def _is_file(name: str) -> bool:
    try:
        return Path(name).exists()
    except OSError:  # the name is too long for a file
        return False


def members_of(inputs: Iterable[str]) -> Members:
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


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


OF_MEMBER = ("trace", "source", "model", "run", "library", "family")
MOST_REASON = 200  # maximum number of characters shown of the reason why a file was skipped
# context manager that is entered while a file is read, to report progress
Reading = Callable[[Path], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Several traces as one table.

    frame : one row per trace and signature; `share` is the signature's share of the trace's time
    """

    frame: pd.DataFrame
    members: Sequence[Member]
    notes: Sequence[str] = ()

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(member.source for member in sorted(self.members, key=lambda item: not item.is_trace)))

    def of_source(self, source: str) -> Corpus:
        members = [member for member in self.members if member.source == source]
        return replace(self, frame=self.frame[self.frame["source"] == source], members=members)

    def path_of(self, trace: str) -> Path:
        return next(member.path for member in self.members if member.name == trace)


def read_corpus(
    inputs: Iterable[str],
    partial: bool | None = True,
    unbounded: bool = False,
    reading: Reading = lambda path: nullcontext(),
) -> Corpus:
    """Return the corpus of some trace files, of which only one is in memory at a time.

    inputs : traces, files of other tools, folders of such files, `zoo`, or `zoo:PATTERN`
    reading : returns a context manager to enter while a file is read
    """
    files = members_of(inputs)
    notes = []
    if files.absent:
        notes.append(f"{counted(len(files.absent), 'trace')} of the zoo not installed: {', '.join(files.absent)}")
    notes += [f"{path} is not a trace" for path in files.passed_over]
    members: list[Member] = []
    tables: list[pd.DataFrame] = []
    for member in files.members:
        try:
            with reading(member.path):
                trace = load(member.path, partial, unbounded)
                own_member = _unlike(member.described_by(trace.header), members)
                rows = rows_of(trace)
        except UserError as error:
            if member.is_named:
                raise
            notes.append(str(error))
            continue
        if trace.missing:
            notes.append(trace.missing)
        if rows.empty:
            notes.append(f"{member.name} contains no calls")
            continue
        members.append(own_member)
        facts = {"trace": own_member.name, **asdict(own_member)}
        for index, name in enumerate(OF_MEMBER):
            rows.insert(index, name, facts[name])
        tables.append(rows)
    if not tables:
        why = f": {shortened(printable(notes[-1]), MOST_REASON)}" if notes else ""
        raise UserError(f"these files contain no calls{why}", "use traces of a model that ran")
    return Corpus(weighted(pd.concat(tables, ignore_index=True)), members, notes)


def weighted(frame: pd.DataFrame) -> pd.DataFrame:
    """Add the column `weight` to a corpus's table: the weight of the row's trace in statistics over models."""
    traces = frame.groupby("trace", sort=False).agg(
        source=("source", "first"), model=("model", "first"), time_us=("time_us", "sum"), calls=("count", "sum")
    )
    of_model = traces.groupby(["source", "model"])
    by_calls = traces["calls"] / of_model["calls"].transform("sum")
    is_timed = of_model["time_us"].transform("sum") > 0
    part = (1.0 / of_model["calls"].transform("size")).where(is_timed, by_calls)
    weight = part / traces.groupby("source")["model"].transform("nunique")
    return frame.assign(weight=frame["trace"].map(weight))


def _unlike(member: Member, members: Sequence[Member]) -> Member:
    names = {other.name for other in members}
    if member.name not in names:
        return member
    number = 2
    while f"{member.name} ({number})" in names:
        number += 1
    return replace(member, name=f"{member.name} ({number})")


MOST_SHAPES = 120  # maximum length of the shapes column in characters
MOST_ELEMENTS = (1 << 63) - 1  # maximum element count, because a shape in an untrusted file can contain any number


def rows_of(trace: Trace) -> pd.DataFrame:
    calls = trace.own_calls
    groups = calls.groupby("signature")
    counts, medians = groups.size(), groups["time_ns"].median()
    contexts = contexts_of(trace, calls)
    rows = [
        {
            "signature": signature.number,
            **signature_facts(signature, contexts.get(signature.number, {})),
            "count": int(counts[signature.number]),
            "median_us": float(medians[signature.number]) / 1e3,
        }
        for signature in trace.signatures
        if signature.number in counts.index
    ]
    table = pd.DataFrame(rows, columns=COLUMNS)
    table["time_us"] = table["count"] * table["median_us"]
    table["call_share"] = table["count"] / max(float(table["count"].sum()), 1.0)
    # without times, every call has the same weight
    has_times = bool(table["time_us"].any())
    table["share"] = table["time_us"] / float(table["time_us"].sum()) if has_times else table["call_share"]
    return table


COLUMNS = (
    *("signature", "key", "kind", "op", "call", "shapes", "dtypes", "device", "elements", "count", "median_us"),
    *("time_us", "call_share", "share"),
)


def written_from(frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    rows = frame[frame["key"].isin(list(keys))]
    return rows.sort_values("time_us", ascending=False, kind="stable").drop_duplicates("key")


def signature_facts(signature: Signature, context: Mapping[str, Any]) -> dict[str, Any]:
    specs = list(tensors([signature.args, signature.kwargs]))
    return {
        "key": key_of_case(signature, context),
        "kind": signature.kind,
        "op": signature.op,
        "call": call_outline(signature),
        "shapes": shapes_text(specs),
        "dtypes": ",".join(dict.fromkeys(plain_name(spec.dtype) for spec in specs)),
        "device": next(iter(dict.fromkeys(spec.device for spec in specs)), ""),
        "elements": min(max((prod(spec.shape) for spec in specs), default=0), MOST_ELEMENTS),
    }


def shapes_text(specs: list[TensorSpec]) -> str:
    return shortened(" ".join(f"[{','.join(map(str, spec.shape))}]" for spec in specs), MOST_SHAPES)
