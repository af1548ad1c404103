"""Marks of `record_function`: they are no operators that do something, and tell under which label other calls ran."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from opgrip.cli.command import STEP
from opgrip.traces.codec.call_blocks import Integers
from opgrip.traces.schema.records import FUNCTION, Signature

MARKS = "profiler."
"""How the names of operators begin that only tell a profiler something."""
ENTER, EXIT = "profiler._record_function_enter", "profiler._record_function_exit"
AUTOGRAD = "autograd"
"""How the names of the threads begin that run backward passes for another thread, which waits."""


STEP_LABEL = re.compile(rf"{STEP} [0-9]{{1,9}}")
"""Of the steps of a recording that was asked for."""


def is_mark(op: str) -> bool:
    """Whether an operator of that name is a mark."""
    return op.startswith(MARKS)


def are_marks(calls: pd.DataFrame) -> pd.Series[bool]:
    """Of each call of a trace's table, whether it is a mark."""
    return calls["op"].isin([name for name in calls["op"].cat.categories if is_mark(str(name))])


def own_calls(calls: pd.DataFrame) -> pd.DataFrame:
    """The calls of a trace's table that stand for themselves: see `Trace.own_calls`."""
    own = (calls["inside"].isna() | calls["gripped"]) & (calls["kind"] != FUNCTION)
    return calls[own & ~are_marks(calls)]


def label_of(signature: Signature) -> str | None:
    """The label that a call of a signature opens; None where it opens none."""
    label = signature.args[0] if signature.op.startswith(ENTER) and signature.args else None
    return label if isinstance(label, str) else None


def labeled(
    calls: pd.DataFrame, label_by_signature: Mapping[int, str], is_selected: Callable[[str], bool]
) -> pd.Series[bool]:
    """Of each call of a trace's table, whether it ran within a label that is selected.

    Labels nest within their thread. Calls of threads that autograd starts have those that are open in any other one.

    Parameters
    ----------
    label_by_signature : the labels that calls of signatures open
    """
    spans: list[tuple[int, int]] = []
    within = np.zeros(len(calls), dtype=np.bool_)
    threads = [calls["process"].cat.codes, calls["thread"].cat.codes]
    for places in calls.groupby(threads, sort=False).indices.values():
        flags, own_spans = _within(calls.iloc[places], label_by_signature, is_selected)
        within[places] = flags
        spans += own_spans
    of_autograd = np.flatnonzero(calls["thread"].astype(str).str.startswith(AUTOGRAD))
    within[of_autograd] |= _are_in_spans(calls["start_ns"].to_numpy()[of_autograd], spans)
    return pd.Series(within, index=calls.index)


def _are_in_spans(times: Integers, spans: list[tuple[int, int]]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Of each time, whether it lies in one of some spans, their ends among them."""
    bounds = np.sort(np.array(spans, dtype=np.int64).reshape(-1, 2), axis=0)
    # more have begun than have ended before
    return np.searchsorted(bounds[:, 0], times, side="right") > np.searchsorted(bounds[:, 1], times, side="left")


def _within(
    calls: pd.DataFrame, label_by_signature: Mapping[int, str], is_selected: Callable[[str], bool]
) -> tuple[list[bool], list[tuple[int, int]]]:
    """Of each call of one thread, whether a selected label is open; and from when to when one is."""
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
