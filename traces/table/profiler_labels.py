"""Labels of `record_function`, which a trace contains as calls that compute nothing."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from opgrip.cli.command import STEP
from opgrip.traces.schema.records import FUNCTION, Signature

if TYPE_CHECKING:
    import pandas as pd

MARKS = "profiler."  # prefix of the operators that only mark labels for a profiler
ENTER, EXIT = "profiler._record_function_enter", "profiler._record_function_exit"
MARK_ENTER, MARK_EXIT = f"{ENTER}_new.default", f"{EXIT}._RecordFunction"
AUTOGRAD = "autograd"  # prefix of the names of threads that run backward passes for a waiting thread


# pattern of the labels of steps in a recording that was started on demand
STEP_LABEL = re.compile(rf"{STEP} [0-9]{{1,9}}")


def is_mark(op: str) -> bool:
    return op.startswith(MARKS)


def is_operator(op: str, kind: str) -> bool:
    return kind != FUNCTION and not is_mark(op)


def are_marks(calls: pd.DataFrame) -> pd.Series[bool]:
    return calls["op"].isin([name for name in calls["op"].unique() if is_mark(str(name))])


def operator_calls(calls: pd.DataFrame) -> pd.DataFrame:
    """Return a table of calls without the rows of `record_function` labels and of functions recorded with `--grip`."""
    return calls[(calls["kind"] != FUNCTION) & ~are_marks(calls)]


def own_calls(calls: pd.DataFrame) -> pd.DataFrame:
    return operator_calls(calls[calls["inside"].isna() | calls["gripped"]])


def label_of(signature: Signature, op: str = ENTER) -> str | None:
    """Return the label that calls of the signature open, or those that `op=EXIT` selects close by its name."""
    label = signature.args[0] if signature.op.startswith(op) and signature.args else None
    return label if isinstance(label, str) else None


_Range = tuple[int, int, str]  # first row, row after the last one, and label
OpenLabel = TypeVar("OpenLabel", bound=tuple[Any, Any])


def close_label(key: Any, in_thread: list[OpenLabel], in_other_threads: Iterable[list[OpenLabel]]) -> OpenLabel | None:
    """Remove and return the newest open label whose second item is `key`; None closes the thread's newest label."""
    if key is None:
        return in_thread.pop() if in_thread else None
    for labels in (in_thread, *in_other_threads):
        for place in range(len(labels) - 1, -1, -1):
            if labels[place][1] == key:
                return labels.pop(place)
    return None


def labeled(
    calls: pd.DataFrame, signatures: Iterable[Signature], is_selected: Callable[[str], bool]
) -> pd.Series[bool]:
    """Return a mask of the calls that ran within a selected `record_function` label; `calls` are in start order."""
    import pandas as pd

    within = np.zeros(len(calls), dtype=np.bool_)
    for span, inside, label in _blocks(calls, signatures):
        if is_selected(label):
            within[span] |= inside
    return pd.Series(within, index=calls.index)


def innermost_labels(calls: pd.DataFrame, signatures: Iterable[Signature]) -> pd.Series[Any]:
    """Return the label of the innermost `record_function` block around each call; `calls` are in start order."""
    import pandas as pd

    labels = np.full(len(calls), "", dtype=object)
    for span, inside, label in _blocks(calls, signatures):
        labels[span][inside] = label
    return pd.Series(labels, index=calls.index, dtype=object)


def _blocks(
    calls: pd.DataFrame, signatures: Iterable[Signature]
) -> Iterator[tuple[slice, np.ndarray[Any, np.dtype[np.bool_]], str]]:
    # for each label, outer ones first: rows from its first to its last call, which of them it is around, and the label
    threads = calls.groupby(["process", "thread"], sort=False, observed=True, dropna=False).ngroup().to_numpy()
    processes = _processes(calls)
    of_autograd = calls["thread"].astype(str).str.startswith(AUTOGRAD).to_numpy()
    for first, stop, label in sorted(_ranges(calls, threads, {item.number: item for item in signatures})):
        # the row after the last call closes the label
        span = slice(first, stop + 1)
        of_backward = of_autograd[span] & (processes[span] == processes[first])
        yield span, of_backward | (threads[span] == threads[first]), label


def _processes(calls: pd.DataFrame) -> np.ndarray[Any, Any]:
    import pandas as pd

    return pd.factorize(calls["process"])[0]


def _ranges(calls: pd.DataFrame, threads: Any, signatures: Mapping[int, Signature]) -> Iterator[_Range]:
    open_labels: defaultdict[int, defaultdict[int, list[tuple[int, str]]]] = defaultdict(lambda: defaultdict(list))
    places = np.flatnonzero(are_marks(calls))
    numbers, processes = calls["signature"].iloc[places].tolist(), _processes(calls)[places].tolist()
    for place, thread, number, process in zip(
        places.tolist(), threads[places].tolist(), numbers, processes, strict=True
    ):
        signature, in_threads = signatures[number], open_labels[process]
        label = label_of(signature)
        if label is not None:
            in_threads[thread].append((place, label))
        elif signature.op.startswith(EXIT):
            closed = close_label(label_of(signature, EXIT), in_threads[thread], in_threads.values())
            if closed is not None:
                yield closed[0], place, closed[1]
    for in_threads in open_labels.values():
        yield from ((first, len(calls), label) for labels in in_threads.values() for first, label in labels)
