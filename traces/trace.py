"""A whole trace in memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from opgrip.traces.accelerators import merge_facts
from opgrip.traces.call_table import calls_table, column
from opgrip.traces.device_times import summarize_kernels
from opgrip.traces.errors import UserError
from opgrip.traces.figure_style import in_style
from opgrip.traces.html_forms import as_html
from opgrip.traces.labels import are_marks, label_of, labeled
from opgrip.traces.pictures import check_columns, draw_times
from opgrip.traces.reader import TraceReader
from opgrip.traces.records import (
    FUNCTION,
    Calls,
    Context,
    DeviceTimes,
    Effects,
    End,
    Entered,
    Header,
    Kernels,
    Observed,
    Scope,
    Signature,
    Thread,
    Values,
)
from opgrip.traces.tensor_file import files_beside
from opgrip.traces.values import ValueModel
from opgrip.traces.words import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HTML_ROWS = 20
"""Operators that a notebook shows."""


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
        tensors, first_storage. Module, function, file and line of a call in a backward pass are those of the forward
        call that caused it, where it is known; `own_module` is where it ran itself.
    storages : the memory of each call's tensors: `tensors` numbers from `first_storage` on, as `Calls` has them
    contexts : settings that scopes refer to, by number
    unfinished : the calls that never ended, in a trace that was cut by that
    end : totals and what was dropped; None where the file has no closing record
    missing : what the file lacks, in words; None where it is whole
    unknown : record types and fields of a newer version that were passed over, with their counts
    tensors : by the number of a value model, the key of the values themselves in one of the tensor files
    tensor_files : the files of whole values beside the trace, as far as they are there
    observed : by the number of a signature, what others of its calls met than the first
    effects : by the number of a signature, in the trace of a sample, what its call did
    kernels : what calls of signatures ran on an accelerator, where the trace tells
    """

    header: dict[str, Any]
    signatures: list[Signature]
    scopes: list[Scope]
    values: dict[int, ValueModel]
    calls: pd.DataFrame
    storages: np.ndarray[Any, np.dtype[np.int64]] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    contexts: dict[int, dict[str, Any]] = field(default_factory=dict)
    unfinished: list[Entered] = field(default_factory=list)
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
        holds = f"{counted(len(self.calls), 'call')} of {counted(len(self.signatures), 'signature')}"
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
            parts = "phase" if by != "phase" and self.own_calls["phase"].nunique() > 1 else "module"
        check_columns(by, parts)
        return draw_times(self.summary(*dict.fromkeys((by, parts))), by, parts, title)

    def _repr_html_(self) -> str:
        return as_html([repr(self)], self.summary().head(HTML_ROWS), lambda: self._draw("op", None, ""))

    @property
    def own_calls(self) -> pd.DataFrame:
        """The calls that stand for themselves: without those that extension functions and compiled regions made.

        Nor gripped functions, which are there as the calls that they made, and marks of `record_function`.
        """
        calls = self.calls
        own = (calls["inside"].isna() | calls["gripped"]) & (calls["kind"] != FUNCTION)
        return calls[own & ~are_marks(calls)]

    @property
    def labels(self) -> pd.Series[int]:
        """How often each label of `record_function` was opened, most often first."""
        labels = self.calls["signature"].map(self._label_by_signature())
        return labels.dropna().value_counts()

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
        own = self.own_calls
        typical_ns = own.groupby("signature")["time_ns"].transform("median")
        own = own.assign(typical_ns=typical_ns)
        groups = own.groupby(list(columns or ("op",)), observed=True, dropna=False)
        time_ns = groups["typical_ns"].sum()
        # of a file without times, each call counts alike
        weights = time_ns if time_ns.any() else groups.size()
        table = pd.DataFrame(
            {
                "calls": groups.size(),
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
    path: str | Path, partial: bool | None = None, unbounded: bool = False, reader: TraceReader | None = None
) -> Trace:
    """A trace file's contents, up to wherever it is whole; `Trace.missing` says what it lacks.

    A file of another tool is read as a trace too; see docs/formats.md.

    Parameters
    ----------
    partial : whether to accept a cut or damaged file; None to accept it and warn
    unbounded : read a file that goes beyond the bounds of docs/trace-format.md, for one whose origin is trusted
    reader : of the file, where its format is known or its losses are asked for

    Raises
    ------
    UserError : where the file is not there, empty, of another kind or of a newer major version, or names a file of
        values that is not beside it; beyond a bound; or damaged, and `partial` is false
    """
    reader = reader or TraceReader(path, unbounded)
    header: dict[str, Any] = {}
    signatures: list[Signature] = []
    scopes: list[Scope] = []
    observed: dict[int, list[Observed]] = {}
    effects: dict[int, Effects] = {}
    values: dict[int, ValueModel] = {}
    tensors: dict[int, str] = {}
    contexts: dict[int, dict[str, Any]] = {}
    threads: dict[int, Thread] = {}
    entered: dict[int, list[Entered]] = {}
    blocks: list[Calls] = []
    later: list[DeviceTimes] = []
    kernels: list[Kernels] = []
    end: End | None = None
    for record in reader:
        match record:
            case Header():
                header = record.fields
            case Signature():
                signatures.append(record)
            case Observed():
                observed.setdefault(record.signature, []).append(record)
            case Effects():
                effects[record.signature] = record
            case Scope():
                scopes.append(record)
            case Values():
                values[record.number] = record.model
                if record.tensor is not None:
                    tensors[record.number] = record.tensor
            case Context():
                contexts[record.number] = record.settings
            case Thread():
                threads[record.number] = record
            case Entered():
                entered.setdefault(record.thread, []).append(record)
            case Calls():
                blocks.append(record)
            case DeviceTimes():
                later.append(record)
            case Kernels():
                kernels.append(record)
            case End():
                end = record
                header = _with_accelerators(header, record)
    if reader.missing and partial is None:
        warnings.warn(f"{reader.missing}: what there is of it is loaded", stacklevel=2)
    elif reader.missing and not partial:
        raise UserError(reader.missing, "load what there is with --partial")
    calls = calls_table(blocks, later, signatures, scopes, threads)
    unfinished = _unfinished_calls(entered, blocks)
    return Trace(
        *(header, signatures, scopes, values, calls, column(blocks, "storages"), contexts, unfinished),
        *(end, reader.missing, dict(reader.unknown), tensors, files_beside(reader.path, header), observed, effects),
        kernels,
    )


def _with_accelerators(header: dict[str, Any], end: End) -> dict[str, Any]:
    """A header, with what the closing record tells of accelerators, which the program may have started since."""
    later = {"devices": end.devices, "accelerator": end.accelerator}
    present = {name: facts for name, facts in later.items() if facts}
    before = {name: header[name] for name in present if isinstance(header.get(name), dict)}
    return {**header, **merge_facts(before, present)} if present else header


def _unfinished_calls(entered: dict[int, list[Entered]], blocks: list[Calls]) -> list[Entered]:
    """Of each thread, the calls that were entered and did not end: those that began last.

    A call's row can begin later than it was entered: what a capture looks at before the operator runs is not its time.
    """
    unfinished_calls: list[Entered] = []
    by_thread: dict[int, list[Calls]] = {}
    for block in blocks:
        by_thread.setdefault(block.thread, []).append(block)
    for thread, records in entered.items():
        own = by_thread.get(thread, [])
        starts, signatures = column(own, "start_ns"), column(own, "signature")
        order = np.argsort(starts, kind="stable")
        starts, signatures = starts[order], signatures[order]

        # of the calls that began since, the first: those inside one begin after it
        places = np.searchsorted(starts, [record.start_ns for record in records]).tolist()
        firsts = [signatures[place] if place < len(starts) else -1 for place in places]
        last = int(starts[-1]) if len(starts) else -1
        by_start = {
            record.start_ns: record for record, first in zip(records, firsts, strict=True) if first != record.signature
        }
        # a call that is around others began before them
        newest = max(by_start, default=-1)
        unfinished_calls += [record for start, record in sorted(by_start.items()) if start > last or start == newest]
    return unfinished_calls
