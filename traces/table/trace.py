"""A whole trace in memory, and the function that loads it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import numpy as np
import pandas as pd

from opgrip.cli.command import counted
from opgrip.cli.option_types import matches
from opgrip.display.figures import PALETTE, add_legend, as_html, in_style, label_axis, literal, new_figure
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
    Graph,
    GraphTimes,
    Header,
    Kernels,
    Observed,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
    Wait,
)
from opgrip.traces.table.accelerators import doubt_of_events, merge_facts
from opgrip.traces.table.call_source import CallSource, doubt_of_graphs
from opgrip.traces.table.call_table import (
    COUNT,
    CallNames,
    all_storages,
    calls_table,
    counts_of,
    quantiles,
    rows_table,
    summarize_kernels,
    typical_of,
    with_times,
)
from opgrip.traces.table.distinct_calls import NUMBER, distinct_calls, ordered_rows
from opgrip.traces.table.profiler_labels import (
    are_marks,
    innermost_labels,
    is_operator,
    label_of,
    labeled,
    operator_calls,
    own_calls,
)
from opgrip.traces.table.step_starts import call_filter, patterns_of, unfinished_calls
from opgrip.traces.values import ValueModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")


class LazyField(Generic[T]):
    """Descriptor of a dataclass field that is computed when it is first read; the dataclass must not have slots."""

    def __init__(self, default: Callable[[], T] | None = None) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    @overload
    def __get__(self, item: None, owner: type) -> Callable[[], T]: ...

    @overload
    def __get__(self, item: object, owner: type) -> T: ...

    def __get__(self, item: object | None, owner: type) -> Callable[[], T] | T:
        if item is None:
            # the dataclass decorator takes this as the field's default
            if self._default is None:
                raise AttributeError(self._name)
            return self._default
        value: T | Callable[[], T] = item.__dict__[self._name]
        if callable(value):
            value = item.__dict__[self._name] = value()
        return value

    def __set__(self, item: object, value: T | Callable[[], T]) -> None:
        item.__dict__[self._name] = value


def is_made(item: object, name: str) -> bool:
    return not callable(item.__dict__[f"_{name}"])


HTML_ROWS = 20  # number of operators that a notebook shows


@dataclass(frozen=True, repr=False)
class Trace:
    """A trace file loaded into memory.

    `calls`, `storages` and `unfinished` are computed at first access. For long traces, `distinct_calls` and `summary`
    need less memory, because they do not load all calls.

    Attributes
    ----------
    header : format and tool versions, devices, command, model, seed, time
    signatures : all signatures, in file order
    scopes : origins of calls: module, function, source line, phase
    values : value models by number
    calls : one row per call, label and function recorded with `--grip`, in start order (counts and tables use
        `own_calls`, which leaves out some): signature, op, kind, scope, module, function, file, line, own_module,
        phase, inside (function or operator that made the call instead of the program itself; None for most calls),
        gripped (whether the calls in `inside` count as the program's, as with `--grip`), device (an accelerator if one
        of the tensors is on it), process (in a merged trace), thread, start_ns (since the start of the capture),
        duration_ns, device_ns (NaN for calls that ran only on the host; for a function recorded with `--grip`, the sum
        of its inner calls), stream (torch's number of the device's stream; missing for calls only on the host),
        perturbed (whether the capture's own work, slow page faults or other processes may have prolonged the call),
        host_ns (the duration; for a perturbed call, a typical duration of its signature if known), raw_ns
        (device_ns if present, else duration_ns), time_ns (device_ns if present, else host_ns), page_faults (0 if none
        were counted), slow_memory_ns (estimate of how much longer than usual its page faults took; host_ns excludes
        it), tensors, first_storage. Module, function, file and line of a backward call are those of the forward call
        that caused it, if known; `own_module` is the module in which the call itself ran.
    storages : storage numbers of each call's tensors: `tensors` numbers from `first_storage` on, arguments first
    contexts : settings that scopes refer to, by number
    threads : threads that made calls, by number
    unfinished : calls that never ended
    end : totals and dropped calls; None if the file has no closing record
    missing : description of the missing part of the file; None if it is complete
    unknown : record types and fields of newer versions that were ignored, with their counts
    tensors : by number of a value model, the key of the full values in one of the tensor files
    tensor_files : existing files of full values that belong to the trace
    observed : values and outputs of calls other than the first, by signature number
    effects : for the trace of a sample, counts of operators and changed arguments of each call, by signature number
    kernels : kernels that the calls of each signature ran on an accelerator, if they were recorded
    waits : waits of accelerator streams for other streams, if they were recorded
    path : file or name from which the trace was loaded; None if it was made in memory
    selection : conditions by which `load` or `filter` selected the calls
    source : the calls in blocks of columns, in file order, for functions that process millions of calls
    """

    header: dict[str, Any]
    signatures: list[Signature]
    scopes: list[Scope]
    values: dict[int, ValueModel]
    calls: LazyField[pd.DataFrame] = LazyField()
    storages: LazyField[Integers] = LazyField(lambda: np.empty(0, dtype=np.int64))
    unfinished: LazyField[list[Entered]] = LazyField(list)
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
    waits: list[Wait] = field(default_factory=list)
    path: str | None = None
    selection: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        model = self.header.get("model")
        name = model.get("name") if isinstance(model, dict) else None
        of_model = f" of {name}" if isinstance(name, str) else ""
        lacks = f"; {self.missing}" if self.missing else ""
        calls = counted(int(operator_calls(self.distinct_calls)[COUNT].sum()), "call")
        holds = f"{calls} of {counted(sum(is_operator(item.op, item.kind) for item in self.signatures), 'signature')}"
        return f"<Trace{of_model}: {holds}{lacks}>"

    def plot(self, by: str = "op", parts: str | None = None, title: str | None = None) -> Figure:
        """Return a matplotlib figure that shows how the time is distributed; Jupyter displays it.

        Parameters
        ----------
        by : column of `calls` that has one bar per value: `op`, `module`, `function`, `phase`, `kind`, `device` or
            `thread`
        parts : column that divides the bars; None selects the phase if there are several phases (and `by` is another
            column), else the module
        title : title that replaces the description of the trace

        Raises
        ------
        UserError : if matplotlib is not installed, the trace has no calls, or a column is not supported
        """
        with in_style():
            return self._draw(by, parts, repr(self)[1:-1] if title is None else title)

    def _draw(self, by: str, parts: str | None, title: str) -> Figure:
        if parts is None:
            parts = "phase" if by != "phase" and self.own_distinct_calls["phase"].nunique() > 1 else "module"
        check_columns(by, parts)
        return draw_times(self.summary(list(dict.fromkeys((by, parts)))), by, parts, title)

    def _repr_html_(self) -> str:
        return as_html([repr(self)], self.summary().head(HTML_ROWS), lambda: self._draw("op", None, ""))

    def filter(
        self,
        *,
        op: str | Sequence[str] = (),
        module: str | Sequence[str] = (),
        phase: str | Sequence[str] = (),
        label: str | Sequence[str] = (),
    ) -> Trace:
        """Return the trace with fewer calls; everything else stays. `opgrip.replay.replay` replays only these calls.

        ::

            trace.filter(label="decode", phase="forward").summary()

        Parameters
        ----------
        op, module, phase, label : shell patterns; a call is kept if it matches one pattern of each that is given. It
            matches a label if it ran within such a block of `record_function`.

        Raises
        ------
        UserError : if a phase is unknown, or if the trace is already filtered by one of these, or at all with `label`
        """
        patterns = patterns_of(op=op, module=module, phase=phase, label=label)
        if self.selection.keys() & patterns or ("label" in patterns and self.selection):
            raise UserError("the trace is already filtered", "pass all conditions to one call of filter()")
        calls = self._labeled_calls() if self._label_by_signature() else self.calls
        if labels := patterns.get("label"):
            calls = calls[self.within_labels(lambda label: matches(label, labels)) & ~are_marks(calls)]
        for name in ("op", "module", "phase"):
            names = calls[name].dropna().unique()
            calls = calls[calls[name].isin([value for value in names if matches(value, patterns.get(name, ()))])]
        used = set(calls["signature"])
        return replace(
            self,
            calls=calls,
            signatures=[signature for signature in self.signatures if signature.number in used],
            selection={**self.selection, **patterns},
            storages=lambda: self.storages,
            unfinished=lambda: self.unfinished,
        )

    @property
    def call_count(self) -> int:
        return len(self.calls) if is_made(self, "calls") else self.source.calls

    @property
    def own_calls(self) -> pd.DataFrame:
        """Return the calls that are not part of another recorded call.

        Calls inside extension functions and compiled regions are left out. So are labels of `record_function`, and
        functions recorded with `--grip`; the calls inside these functions are included instead.
        """
        return own_calls(self.calls)

    @cached_property
    def distinct_calls(self) -> pd.DataFrame:
        """Return `calls` with a column `count`; in long traces, a row represents `count` similar calls."""
        if is_made(self, "calls") or self.source.is_kept:
            return self.calls.assign(**{COUNT: 1})
        return distinct_calls(self.source, self.names)

    def call_parts(self) -> Iterator[tuple[pd.DataFrame, Integers]]:
        """Yield `calls` in start order, in parts of limited size if the trace is long, each with its storages."""
        if is_made(self, "calls") or self.source.is_kept or self._has_function_times:
            yield self.calls, self.storages
            return
        typical = typical_of(self.distinct_calls)
        for rows in ordered_rows(self.source):
            table = with_times(rows_table(rows.columns, self.names), typical)
            yield table.set_index(pd.RangeIndex(*(rows.columns[NUMBER][[0, -1]] + [0, 1]))), rows.storages

    @property
    def _has_function_times(self) -> bool:
        # their device times are sums over their inner calls
        calls = self.distinct_calls
        return bool((calls["kind"] == FUNCTION).any() and calls["device_ns"].notna().any())

    @property
    def doubts(self) -> list[str]:
        """Reasons why the calls may not represent the program."""
        doubts = self.header.get("doubts")
        in_header = list(map(str, doubts)) if isinstance(doubts, list) else []
        unseen = self.graphs[~self.graphs["captured"]]
        return [doubt_of_graphs(float(unseen["share"].sum())), *in_header] if len(unseen) else in_header

    @cached_property
    def graphs(self) -> pd.DataFrame:
        """Return a table with one row per CUDA or HIP graph: calls, captured, split, launches, device_us, share.

        `calls` is the number of calls in the graph, `captured` is True if the trace has them, `split` is how the
        launches' time is divided among the calls, and `share` is the share of the device's time that the launches take,
        0 to 1.
        """
        launched, graphs_by_number = self.source.launches(), self.source.graphs.graphs
        own = self.own_distinct_calls if launched else None
        whole_ns = 0.0 if own is None else float((own["device_ns"] * counts_of(own)).sum())
        rows = []
        for number, (launches, device_ns) in launched.items():
            graph = graphs_by_number.get(number)
            about = (0, False, "") if graph is None else (len(graph), True, graph.split)
            rows.append((*about, launches, device_ns / 1e3, device_ns / max(whole_ns, 1.0)))
        table = pd.DataFrame(rows, columns=["calls", "captured", "split", "launches", "device_us", "share"])
        return table.astype({"captured": bool})

    @property
    def device_time_doubt(self) -> str | None:
        """Reason why the calls' device times may include host time, or None if there is none."""
        if self.source.has_later_times or "converted_from" in self.header:
            return None
        if is_made(self, "calls") and self.calls.empty:
            return None
        return doubt_of_events(self.own_distinct_calls)

    @property
    def own_distinct_calls(self) -> pd.DataFrame:
        return own_calls(self.distinct_calls)

    @property
    def names(self) -> CallNames:
        return CallNames(self.signatures, self.scopes, self.threads)

    @property
    def labels(self) -> pd.Series[int]:
        """Return how often each label of `record_function` was opened, most frequent first."""
        calls = self.distinct_calls
        labels = calls["signature"].map(self._label_by_signature())
        counts = calls[COUNT].groupby(labels.astype(object), sort=False).sum()
        return counts.sort_values(ascending=False)

    def within_labels(self, is_selected: Callable[[str], bool]) -> pd.Series[bool]:
        """Return a mask of the rows of `calls` that ran within a selected label of `record_function`."""
        return labeled(self.calls, self.signatures, is_selected)

    def _label_by_signature(self) -> dict[int, str]:
        labels = ((signature.number, label_of(signature)) for signature in self.signatures)
        return {number: label for number, label in labels if label is not None}

    def _labeled_calls(self) -> pd.DataFrame:
        # a filtered trace lacks the calls that open and close labels
        if "label" in self.calls:
            return self.calls
        return self.calls.assign(label=innermost_labels(self.calls, self.signatures))

    def summary(self, by: str | Sequence[str] = "op") -> pd.DataFrame:
        """Return one row per operator by decreasing share of time: op, calls, signatures, time_us, total_us, share.

        `time_us` and `share` use the median time of each signature for all its calls, so that a call which the system
        interrupted does not distort them; `total_us` is the sum of the measured times. A call that ran on an
        accelerator counts with its device time; if there are such calls, the column `host_us` has the sum of all times
        on the host. If no call has a time, `share` is the share of calls. Only the calls in `own_calls` count.

        Parameters
        ----------
        by : columns of `calls`, to group by their values instead of by operator; `label` is the innermost label of
            `record_function`
        """
        names = [by] if isinstance(by, str) else list(by)
        own = self.own_distinct_calls
        if "label" in names:
            own = own_calls(self._labeled_calls().assign(**{COUNT: 1}))
        counts = own[COUNT]
        typical_ns = own["signature"].map(quantiles(own["time_ns"], own["signature"], counts))
        weighed = {name: own[name] * counts for name in ("raw_ns", "duration_ns")}
        own = own.assign(typical_ns=typical_ns.astype(float) * counts, **weighed)
        groups = own.groupby(names, observed=True, dropna=False)
        time_ns, calls = groups["typical_ns"].sum(), groups[COUNT].sum()
        # without times, each call has the same weight
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
        """Return one row per kernel and operator, longest time first."""
        return summarize_kernels(self.kernels, {signature.number: signature.op for signature in self.signatures})


def _plain(calls: pd.DataFrame) -> pd.DataFrame:
    # a frame that users see: `value_counts` of a categorical column also counts names that do not occur
    return calls.astype(dict.fromkeys(calls.select_dtypes("category"), object))


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
    """Load a trace file, up to the first damage; `Trace.missing` describes the missing part.

    Files of other tools are loaded as traces, too; see docs/formats.md.

    Parameters
    ----------
    partial : True to accept a cut or damaged file, False to raise an error, None to accept it with a warning
    unbounded : True to load a file that exceeds the limits in docs/trace-format.md; only for trusted files
    reader : reader of the file, to choose its format or to get the losses of its conversion
    phase, module, op : shell patterns; a call is loaded if it matches one pattern of each that is given
    steps : steps whose calls are loaded, counted from 0

    Raises
    ------
    UserError : if the file cannot be read as a trace, exceeds a limit, or is damaged and `partial` is False; or if the
        requested calls cannot be selected
    """
    reader = reader or TraceReader(path, unbounded)
    patterns = patterns_of(op=op, module=module, phase=phase)
    chosen = call_filter(reader, patterns, steps)
    source = CallSource(reader.again().blocks, None if chosen is None else chosen.select)
    contents = TraceContents(source)
    for record in reader.columns():
        if chosen is not None:
            chosen.note(record)
        contents.add(record)
    if reader.missing and partial is None:
        warnings.warn(f"{reader.missing}: only the records before that are loaded", stacklevel=2)
    elif reader.missing and not partial:
        raise UserError(reader.missing, "load it with --partial")
    selection = patterns if steps is None else {**patterns, "steps": steps}
    return Trace(**contents.attributes(reader), path=str(path), selection=selection)


class TraceContents:
    def __init__(self, source: CallSource) -> None:
        self._source = source
        self._entered: dict[int, list[Entered]] = {}
        self._fields: dict[str, Any] = {
            **{name: {} for name in ("header", "values", "tensors", "threads", "contexts", "observed", "effects")},
            **{name: [] for name in ("signatures", "scopes", "kernels", "waits")},
        }

    def add(self, record: Record | CallBlock) -> None:
        fields = self._fields
        match record:
            case CallBlock():
                self._source.add(record)
            case Header():
                fields["header"] = record.fields
            case Signature():
                fields["signatures"].append(record)
            case Scope():
                fields["scopes"].append(record)
            case Values():
                fields["values"][record.number] = record.model
                if record.tensor is not None:
                    fields["tensors"][record.number] = record.tensor
            case Thread():
                fields["threads"][record.number] = record
            case Entered():
                self._entered.setdefault(record.thread, []).append(record)
            case DeviceTimes():
                self._source.add_times(record)
            case Context():
                fields["contexts"][record.number] = record.settings
            case Observed():
                fields["observed"].setdefault(record.signature, []).append(record)
            case Graph() | GraphTimes():
                self._source.graphs.add(record)
            case Effects():
                fields["effects"][record.signature] = record
            case Kernels():
                fields["kernels"].append(record)
            case Wait():
                fields["waits"].append(record)
            case End():
                fields["end"] = record
                fields["header"] = _with_accelerators(fields["header"], record)

    def attributes(self, reader: TraceReader) -> dict[str, Any]:
        fields = self._fields
        names = CallNames(fields["signatures"], fields["scopes"], fields["threads"])
        self._source.weigh_graphs(fields["signatures"])
        return fields | {
            "calls": lambda: _plain(calls_table(self._source, names)),
            "storages": lambda: all_storages(self._source),
            "unfinished": lambda: unfinished_calls(self._entered, self._source),
            "source": self._source,
            "missing": reader.missing,
            "unknown": dict(reader.unknown),
            "tensor_files": files_beside(reader.path, fields["header"]),
        }


def _with_accelerators(header: dict[str, Any], end: End) -> dict[str, Any]:
    # the closing record knows accelerators that the program first used after the header was written
    later = {"devices": end.devices, "accelerator": end.accelerator}
    present = {name: facts for name, facts in later.items() if facts}
    before = {name: header[name] for name in present if isinstance(header.get(name), dict)}
    return {**header, **merge_facts(before, present)} if present else header


# columns of a trace's calls that can be shown as bars and as their parts
COLUMNS = ("op", "module", "phase", "function", "kind", "device", "thread")
MOST_BARS = 20
LEAST_SHARE = 0.001  # smallest share of the total time for which a bar is shown
MOST_PARTS = 6  # maximum number of named parts; the other parts are added up
REST = "others"
DEEPEST = 4  # maximum depth of module paths in the names of parts


def check_columns(*names: str) -> None:
    strange = [name for name in names if name not in COLUMNS]
    if strange:
        raise UserError(f"a picture cannot be grouped by {strange[0]}", f"choose {', '.join(COLUMNS)}")


def draw_times(table: pd.DataFrame, by: str, parts: str, title: str) -> Figure:
    if table.empty:
        raise UserError("the trace has no calls", "capture a step that calls operators")
    measure = "time_us" if table["time_us"].any() else "calls"
    names = _parts(table[parts].astype(object), parts)
    bars = _texts(table[by].astype(object), by)
    sums = table[measure].groupby([bars.rename("bar"), names.rename("part")]).sum().unstack(fill_value=0)
    total = float(sums.to_numpy().sum()) or 1.0
    sums = sums.loc[sums.sum(axis="columns").sort_values(ascending=False, kind="stable").index]
    sums = sums[sums.sum().sort_values(ascending=False, kind="stable").index]
    shown = sums[sums.sum(axis="columns") >= LEAST_SHARE * total].iloc[:MOST_BARS]
    rest = len(sums) - len(shown)
    figure, (axes,) = new_figure(title, size=(6.6, 1.4 + 0.22 * len(shown)))
    ends = pd.Series(0.0, index=shown.index)
    for place, (name, color) in enumerate(
        zip(_largest_parts(shown).columns, (*PALETTE[:MOST_PARTS], "#999999"), strict=False)
    ):
        widths = _largest_parts(shown).iloc[:, place]
        axes.barh(range(len(shown)), widths, 0.8, ends, color=color, label=literal(name, 28))
        ends = ends + widths
    for height, width in enumerate(ends):
        axes.annotate(
            f"{width / total:.1%}", (width, height), (3, 0), textcoords="offset points", va="center", fontsize=7
        )
    axes.set_yticks(range(len(shown)), [literal(name, 40) for name in shown.index])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.margins(x=0.1)
    axes.grid(axis="y", visible=False)
    if measure == "time_us":
        label_axis(axes.xaxis, "time of all calls", "s", 1e-6)
    else:
        label_axis(axes.xaxis, "calls")
    if rest:
        axes.set_ylabel(f"{rest:,} shorter bars are left out")
    add_legend(figure, axes)
    return figure


def _texts(values: pd.Series[Any], column: str) -> pd.Series[str]:
    absent = "(outside)" if column in ("module", "function") else "-"
    texts = [absent if pd.isna(value) or value == "" else str(value) for value in values]
    return pd.Series(texts, values.index)


def _parts(values: pd.Series[Any], column: str) -> pd.Series[str]:
    # module paths are cut to the smallest depth at which there are more than two different names
    texts = _texts(values, column)
    if column != "module":
        return texts
    for depth in range(1, DEEPEST + 1):
        heads = pd.Series([".".join(text.split(".")[:depth]) for text in texts], texts.index)
        if heads.nunique() > 2:
            return heads
    return heads


def _largest_parts(sums: pd.DataFrame) -> pd.DataFrame:
    if sums.shape[1] <= MOST_PARTS + 1:
        return sums
    few = sums.iloc[:, :MOST_PARTS].copy()
    few[REST] = sums.iloc[:, MOST_PARTS:].sum(axis="columns")
    return few
