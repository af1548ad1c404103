"""A whole trace in memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from opgrip.cli.command import counted
from opgrip.display.figures import as_html, in_style
from opgrip.errors import UserError
from opgrip.traces.codec.call_blocks import CallBlock, Integers
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.io.tensor_file import files_beside
from opgrip.traces.schema.records import (
    FUNCTION,
    Context,
    DeviceTimes,
    Effects,
    End,
    Entered,
    Header,
    Kernels,
    Observed,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
)
from opgrip.traces.table.accelerators import merge_facts
from opgrip.traces.table.call_filter import call_filter
from opgrip.traces.table.call_source import CallSource
from opgrip.traces.table.call_table import (
    COUNT,
    CallNames,
    all_storages,
    calls_table,
    quantiles,
    rows_table,
    summarize_kernels,
    typical_of,
    with_times,
)
from opgrip.traces.table.distinct_calls import NUMBER, distinct_calls, ordered_rows
from opgrip.traces.table.lazy_fields import LazyField, is_made
from opgrip.traces.table.profiler_labels import label_of, labeled, own_calls
from opgrip.traces.table.step_starts import unfinished_calls
from opgrip.traces.table.time_pictures import check_columns, draw_times
from opgrip.traces.values import ValueModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HTML_ROWS = 20
"""Operators that a notebook shows."""


def _none() -> Integers:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, repr=False)
class Trace:
    """What a trace file holds.

    Attributes
    ----------
    header : format and tool versions, devices, command, model, seed, time
    signatures : all that calls are made of, in the order of their first calls
    scopes : where calls came from
    values : value models by number
    calls : one row a call, in the order in which the calls started: signature, op, kind, scope, module, function,
        file, line, own_module, phase, inside, gripped (whether what it is inside of is a gripped function), device (of
        its tensors: an accelerator, where one is among them), process (in a merged trace), thread, start_ns (since the
        start of the capture), duration_ns, device_ns (nan for what ran on the host alone; of a gripped function, the
        sum of the calls inside it), stream (its number, for others), perturbed (whether the capture's own work ran
        right before it, or within it), host_ns (its duration; of one that was perturbed, the median of its signature's
        others, where there are any; so of one that was interrupted), raw_ns (of the device where there is one, else the
        duration), time_ns (of the device where there is one, else host_ns), page_faults (0 where none were counted),
        slow_memory_ns (estimate of how much longer than usual its page faults took; host_ns is without it),
        tensors, first_storage. Module, function, file and line of a call in a backward pass are those of the forward
        call that caused it, where it is known; `own_module` is where it ran itself.
    storages : the memory of each call's tensors: `tensors` numbers from `first_storage` on, as `Calls` has them
    contexts : settings that scopes refer to, by number
    threads : those that made calls, by number
    unfinished : the calls that never ended, in a trace that was cut by that
    end : totals and what was dropped; None where the file has no closing record
    missing : what the file lacks, in words; None where it is whole
    unknown : record types and fields of a newer version that were passed over, with their counts
    tensors : by the number of a value model, the key of the values themselves in one of the tensor files
    tensor_files : the files of whole values beside the trace, as far as they are there
    observed : by the number of a signature, what others of its calls met than the first
    effects : by the number of a signature, in the trace of a sample, what its call did
    kernels : what calls of signatures ran on an accelerator, where the trace tells
    source : the calls in blocks of columns, in the order of the file: for what looks at each of millions of them

    `calls`, `storages` and `unfinished` are made when they are first asked for. `distinct_calls`, and what is summed up
    of it, such as `summary`, need them not: they take no more memory for a longer trace.
    """

    header: dict[str, Any]
    signatures: list[Signature]
    scopes: list[Scope]
    values: dict[int, ValueModel]
    calls: LazyField[pd.DataFrame] = LazyField()  # noqa: RUF009 - a descriptor
    storages: LazyField[Integers] = LazyField(_none)  # noqa: RUF009 - a descriptor
    unfinished: LazyField[list[Entered]] = LazyField(list)  # noqa: RUF009 - a descriptor
    source: CallSource = field(default_factory=lambda: CallSource(tuple))
    threads: dict[int, Thread] = field(default_factory=dict)
    contexts: dict[int, dict[str, Any]] = field(default_factory=dict)
    end: End | None = None
    missing: str | None = None
    unknown: dict[str, int] = field(default_factory=dict)
    tensors: dict[int, str] = field(default_factory=dict)
    tensor_files: tuple[Path, ...] = ()
    observed: dict[int, list[Observed]] = field(default_factory=dict)
    effects: dict[int, Effects] = field(default_factory=dict)
    kernels: list[Kernels] = field(default_factory=list)

    def __repr__(self) -> str:
        model = self.header.get("model")
        name = model.get("name") if isinstance(model, dict) else None
        of_model = f" of {name}" if isinstance(name, str) else ""
        lacks = f"; {self.missing}" if self.missing else ""
        holds = f"{counted(self.call_count, 'call')} of {counted(len(self.signatures), 'signature')}"
        return f"<Trace{of_model}: {holds}{lacks}>"

    def plot(self, by: str = "op", parts: str | None = None, title: str | None = None) -> Figure:
        """A picture of where the time goes: a figure of matplotlib, which Jupyter shows.

        Parameters
        ----------
        by : the column of `calls` whose values have bars: `op`, `module`, `function`, `phase`, `kind`, `device` or
            `thread`
        parts : the column that divides the bars; None for the phase where there are several, else the module
        title : in place of what the trace is of

        Raises
        ------
        UserError : where matplotlib is not installed, the trace has no calls, or these are no such columns
        """
        with in_style():
            return self._draw(by, parts, repr(self)[1:-1] if title is None else title)

    def _draw(self, by: str, parts: str | None, title: str) -> Figure:
        if parts is None:
            parts = "phase" if by != "phase" and self.own_distinct_calls["phase"].nunique() > 1 else "module"
        check_columns(by, parts)
        return draw_times(self.summary(*dict.fromkeys((by, parts))), by, parts, title)

    def _repr_html_(self) -> str:
        return as_html([repr(self)], self.summary().head(HTML_ROWS), lambda: self._draw("op", None, ""))

    @property
    def call_count(self) -> int:
        """How many calls the trace has."""
        return len(self.calls) if is_made(self, "calls") else self.source.calls

    @property
    def own_calls(self) -> pd.DataFrame:
        """The calls that stand for themselves: without those that extension functions and compiled regions made.

        Nor gripped functions, which are there as the calls that they made, and marks of `record_function`.
        """
        return own_calls(self.calls)

    @cached_property
    def distinct_calls(self) -> pd.DataFrame:
        """`calls` without those that are like others in all but when they started, with `count`.

        In the order in which the first of each started; without `tensors` and `first_storage`.
        """
        if is_made(self, "calls") or self.source.is_kept:
            return self.calls.assign(**{COUNT: 1})
        return distinct_calls(self.source, self.names)

    def call_parts(self) -> Iterator[tuple[pd.DataFrame, Integers]]:
        """`calls` a part at a time, in memory that does not grow with their number.

        Each part has the rows that follow those of the one before, under the same index, and the storages that its
        `first_storage` counts in.
        """
        if is_made(self, "calls") or self.source.is_kept or self._has_function_times:
            yield self.calls, self.storages
            return
        typical = typical_of(self.distinct_calls)
        for rows in ordered_rows(self.source):
            table = with_times(rows_table(rows.columns, self.names), typical)
            yield table.set_index(pd.RangeIndex(*(rows.columns[NUMBER][[0, -1]] + [0, 1]))), rows.storages

    @property
    def _has_function_times(self) -> bool:
        """Whether functions have the time of the calls inside them, which all together tell."""
        calls = self.distinct_calls
        return bool((calls["kind"] == FUNCTION).any() and calls["device_ns"].notna().any())

    @property
    def own_distinct_calls(self) -> pd.DataFrame:
        """Those of `distinct_calls` that stand for themselves."""
        return own_calls(self.distinct_calls)

    @property
    def names(self) -> CallNames:
        """What the numbers in blocks of calls refer to."""
        return CallNames(self.signatures, self.scopes, self.threads)

    @property
    def labels(self) -> pd.Series[int]:
        """How often each label of `record_function` was opened, most often first."""
        calls = self.distinct_calls
        labels = calls["signature"].map(self._label_by_signature())
        counts = calls[COUNT].groupby(labels.astype(object), sort=False).sum()
        return counts.sort_values(ascending=False)

    def within_labels(self, is_selected: Callable[[str], bool]) -> pd.Series[bool]:
        """Of each of `calls`, whether it ran within a `record_function` whose label is selected."""
        return labeled(self.calls, self._label_by_signature(), is_selected)

    def _label_by_signature(self) -> dict[int, str]:
        labels = ((signature.number, label_of(signature)) for signature in self.signatures)
        return {number: label for number, label in labels if label is not None}

    def summary(self, *columns: str) -> pd.DataFrame:
        """One row an operator, by falling share of time: op, calls, signatures, time_us, total_us, share.

        Each call counts to `time_us` and `share` with the median of its signature's calls, so that one that the system
        interrupted weighs no more than the others; `total_us` is the sum of what they really took. A call that
        worked on an accelerator counts with the time that it kept that busy; where there are such calls, a column
        `host_us` has the sum of all calls' times on the host. Where no call has a time, `share` is of the calls.
        Calls that an extension function made count to the function's time, and have no row of their own. A gripped
        function has none: its calls have.

        Parameters
        ----------
        columns : of `calls`, to have a row for each of their values in place of operators
        """
        own = self.own_distinct_calls
        counts = own[COUNT]
        typical_ns = own["signature"].map(quantiles(own["time_ns"], own["signature"], counts))
        weighed = {name: own[name] * counts for name in ("raw_ns", "duration_ns")}
        own = own.assign(typical_ns=typical_ns.astype(float) * counts, **weighed)
        groups = own.groupby(list(columns or ("op",)), observed=True, dropna=False)
        time_ns, calls = groups["typical_ns"].sum(), groups[COUNT].sum()
        # of a file without times, each call counts alike
        weights = time_ns if time_ns.any() else calls
        table = pd.DataFrame(
            {
                "calls": calls,
                "signatures": groups["signature"].nunique(),
                "time_us": time_ns / 1e3,
                "total_us": groups["raw_ns"].sum() / 1e3,
                "share": weights / max(float(weights.sum()), 1.0),
            }
        )
        if own["device_ns"].notna().any():
            table["host_us"] = groups["duration_ns"].sum() / 1e3
        return table.sort_values(["share", "calls"], ascending=False).reset_index()

    def kernels_by_operator(self) -> pd.DataFrame:
        """One row a kernel and operator, by falling time on the device: kernel, op, launches, time_us, share.

        Empty where the trace tells of none: it was captured without `--device-time kernels`.
        """
        return summarize_kernels(self.kernels, {signature.number: signature.op for signature in self.signatures})


def load(
    path: str | Path,
    partial: bool | None = None,
    unbounded: bool = False,
    reader: TraceReader | None = None,
    *,
    phase: str | Sequence[str] = (),
    module: str | Sequence[str] = (),
    op: str | Sequence[str] = (),
    steps: range | int | None = None,
) -> Trace:
    """A trace file's contents, up to wherever it is whole; `Trace.missing` says what it lacks.

    A file of another tool is read as a trace too; see docs/formats.md.

    Parameters
    ----------
    partial : whether to accept a cut or damaged file; None to accept it and warn
    unbounded : read a file that goes beyond the bounds of docs/trace-format.md, for one whose origin is trusted
    reader : of the file, where its format is known or its losses are asked for
    phase, module, op : only calls in such a phase, of modules and of operators of such names, as shells match file
        names; where there are several, one of them must match
    steps : only calls of these steps of `opcapture`, counted from 0

    Raises
    ------
    UserError : where the file is not there, empty, of another kind or of a newer major version, or names a file of
        values that is not beside it; beyond a bound; or damaged, and `partial` is false
    """
    reader = reader or TraceReader(path, unbounded)
    chosen = call_filter(reader, phase, module, op, steps)
    source = CallSource(reader.again().blocks, None if chosen is None else chosen.select)
    contents = _Contents(source)
    for record in reader.columns():
        if chosen is not None:
            chosen.note(record)
        contents.add(record)
    if reader.missing and partial is None:
        warnings.warn(f"{reader.missing}: what there is of it is loaded", stacklevel=2)
    elif reader.missing and not partial:
        raise UserError(reader.missing, "load what there is with --partial")
    return contents.trace(reader)


class _Contents:
    """The records of a trace that is being loaded."""

    def __init__(self, source: CallSource) -> None:
        self._source = source
        self._header: dict[str, Any] = {}
        self._values: dict[int, ValueModel] = {}
        self._tensors: dict[int, str] = {}
        self._entered: dict[int, list[Entered]] = {}
        self._signatures: list[Signature] = []
        self._scopes: list[Scope] = []
        self._threads: dict[int, Thread] = {}
        self._others: dict[str, Any] = {"contexts": {}, "observed": {}, "effects": {}, "kernels": [], "end": None}

    def add(self, record: Record | CallBlock) -> None:
        """Add a record."""
        match record:
            case CallBlock():
                self._source.add(record)
            case Header():
                self._header = record.fields
            case Signature():
                self._signatures.append(record)
            case Scope():
                self._scopes.append(record)
            case Values():
                self._values[record.number] = record.model
                if record.tensor is not None:
                    self._tensors[record.number] = record.tensor
            case Thread():
                self._threads[record.number] = record
            case Entered():
                self._entered.setdefault(record.thread, []).append(record)
            case DeviceTimes():
                self._source.add_times(record)
            case Context():
                self._others["contexts"][record.number] = record.settings
            case Observed():
                self._others["observed"].setdefault(record.signature, []).append(record)
            case Effects():
                self._others["effects"][record.signature] = record
            case Kernels():
                self._others["kernels"].append(record)
            case End():
                self._others["end"] = record
                self._header = _with_accelerators(self._header, record)

    def trace(self, reader: TraceReader) -> Trace:
        """Return the trace of all records."""
        names = CallNames(self._signatures, self._scopes, self._threads)
        return Trace(
            header=self._header,
            signatures=self._signatures,
            scopes=self._scopes,
            values=self._values,
            calls=lambda: calls_table(self._source, names),
            storages=lambda: all_storages(self._source),
            unfinished=lambda: unfinished_calls(self._entered, self._source),
            source=self._source,
            threads=self._threads,
            missing=reader.missing,
            unknown=dict(reader.unknown),
            tensors=self._tensors,
            tensor_files=files_beside(reader.path, self._header),
            **self._others,
        )


def _with_accelerators(header: dict[str, Any], end: End) -> dict[str, Any]:
    """A header, with what the closing record tells of accelerators, which the program may have started since."""
    later = {"devices": end.devices, "accelerator": end.accelerator}
    present = {name: facts for name, facts in later.items() if facts}
    before = {name: header[name] for name in present if isinstance(header.get(name), dict)}
    return {**header, **merge_facts(before, present)} if present else header
