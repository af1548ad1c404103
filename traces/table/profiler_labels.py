"""Labels of `record_function`, which a trace contains as calls that compute nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from opgrip.cli.command import STEP
from opgrip.traces.codec.call_blocks import Integers
from opgrip.traces.schema.records import FUNCTION, Signature

MARKS = "profiler."  # prefix of the operators that only mark labels for a profiler
ENTER, EXIT = "profiler._record_function_enter", "profiler._record_function_exit"
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


def label_of(signature: Signature) -> str | None:
    label = signature.args[0] if signature.op.startswith(ENTER) and signature.args else None
    return label if isinstance(label, str) else None


def labeled(
    calls: pd.DataFrame, label_by_signature: Mapping[int, str], is_selected: Callable[[str], bool]
) -> pd.Series[bool]:
    """Return a mask of the calls that ran within a selected `record_function` label; `calls` are in start order."""
    spans: list[tuple[int, int]] = []
    within = np.zeros(len(calls), dtype=np.bool_)
    for places in calls.groupby(["process", "thread"], sort=False, dropna=False).indices.values():
        flags, own_spans = _within(calls.iloc[places], label_by_signature, is_selected)
        within[places] = flags
        spans += own_spans
    of_autograd = np.flatnonzero(calls["thread"].astype(str).str.startswith(AUTOGRAD))
    within[of_autograd] |= _are_in_spans(calls["start_ns"].to_numpy()[of_autograd], spans)
    return pd.Series(within, index=calls.index)


def _are_in_spans(times: Integers, spans: list[tuple[int, int]]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    bounds = np.sort(np.array(spans, dtype=np.int64).reshape(-1, 2), axis=0)
    # a time is inside if more spans have begun than have ended before it
    return np.searchsorted(bounds[:, 0], times, side="right") > np.searchsorted(bounds[:, 1], times, side="left")


def _within(
    calls: pd.DataFrame, label_by_signature: Mapping[int, str], is_selected: Callable[[str], bool]
) -> tuple[list[bool], list[tuple[int, int]]]:
    open_labels: list[bool] = []
    flags: list[bool] = []
    spans: list[tuple[int, int]] = []
    began: Any = None
    start = selected = 0
    columns = (calls[name].tolist() for name in ("signature", "op", "start_ns"))
    for signature, op, start in zip(*columns, strict=True):
        label = label_by_signature.get(signature)
        if label is not None:
            open_labels.append(is_selected(label))
            selected += open_labels[-1]
        elif str(op).startswith(EXIT) and open_labels:
            selected -= open_labels.pop()
        is_open = selected > 0
        flags.append(is_open)
        if is_open and began is None:
            began = start
        elif not is_open and began is not None:
            spans.append((began, start))
            began = None
    return flags, [*spans, *([(began, start)] if began is not None else [])]
