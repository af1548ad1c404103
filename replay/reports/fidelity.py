"""How far replayed times are from the captured ones, on the machine where the trace was captured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import Any

import numpy as np

from opgrip.cli.command import counted
from opgrip.replay.cases.cases import Case
from opgrip.replay.inputs.filling import Stored
from opgrip.replay.modes import EAGER
from opgrip.replay.operators.memory import LARGE
from opgrip.replay.results.results import DIFFERS, OK, Result
from opgrip.replay.timing.timing_options import DISCRETE, EVENTS
from opgrip.traces import Trace
from opgrip.traces.schema.arguments import tensors
from opgrip.traces.table.accelerators import CONTENDED, HOST
from opgrip.traces.values.exact import Constant, Exact

HERE, FIDELITY = "recorded_here", "fidelity"  # fields of a results file's header
FACTOR = 1.5  # ratio of the replayed and the captured time, or its inverse, above which a row is marked
LEAST_SHARE = 0.02  # share of the time below which a row is not marked
SHORT_US = 5
MOST_CALLS = 300_000  # maximum number of calls of a trace that are searched for calls of other threads
# likely reasons why a row without other doubts is marked, the first that applies, and their meanings
REASONS = {
    "captured time": "it is of one call, or of calls that were disturbed or vary by over a quarter",
    "busy capture": "other processes used the cores during the capture",
    "repeated runs": "other processes disturbed most of the timed runs, which were repeated",
    "waits": "the call waits for the device, which has other work in the program",
    "short": f"the capture's own work before a call of less than {SHORT_US} us leaves it colder caches",
    "values": "integers or booleans are drawn from a model, and others may cost another time",
    "new memory": "results are in newly mapped memory, or the trace does not record whether they are",
    "other threads": "other threads of the program ran calls at the same time",
    "unknown": "time it in its sequence with --sequence",
}


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How much the replayed times of a run differ from the captured ones.

    ratio : sum of the replayed times divided by the sum of the captured times
    error : sum of the absolute differences divided by the sum of the captured times
    share : share of the captured time of all selected calls for which times are compared
    doubtful_share : share of the captured time of all selected calls in rows marked as `differs`
    """

    ratio: float
    error: float
    share: float = 1.0
    doubtful_share: float = 0.0
    doubtful_rows: int = 0

    @classmethod
    def of(cls, times: Sequence[tuple[int, float, float]]) -> Fidelity | None:
        captured_us = fsum(count * captured for count, captured, _ in times)
        if not captured_us:
            return None
        replayed_us = fsum(count * replayed for count, _, replayed in times)
        off_us = fsum(count * abs(replayed - captured) for count, captured, replayed in times)
        return cls(replayed_us / captured_us, off_us / captured_us)

    @property
    def line(self) -> str:
        return (
            f"over {self.share:.1%} of the selected calls' captured time: replayed / captured {self.ratio:.2f}, "
            f"time-weighted error {self.error:.1%}, "
            f"{self.doubtful_share:.1%} of the time in {counted(self.doubtful_rows, 'doubtful row')}"
        )


def fidelity_of(rows: Iterable[Result], header: Mapping[str, Any]) -> Fidelity | None:
    compared = [row for row in rows if header.get(HERE) and _is_comparable(row)]
    fidelity = Fidelity.of([(row.count, row.captured_us or 0.0, row.median_us or 0.0) for row in compared])
    if fidelity is None:
        return None
    doubtful = [row.share or 0.0 for row in compared if row.differs]
    share = min(fsum(row.share or 0.0 for row in compared), 1.0)
    return replace(fidelity, share=share, doubtful_share=fsum(doubtful), doubtful_rows=len(doubtful))


def with_doubts(rows: Iterable[Result], cases: Iterable[Case], trace: Trace) -> list[Result]:
    case_of = {case.number: case for case in cases}
    marked = []
    for row in rows:
        if _is_comparable(row) and row.captured_us and (row.share or 0.0) >= LEAST_SHARE:
            ratio = (row.median_us or 0.0) / row.captured_us
            if not 1 / FACTOR <= ratio <= FACTOR:
                reason = "" if row.doubts else f" ({_likely_reason(row, case_of[row.case], trace)})"
                row = replace(row, doubts=f"{row.doubts}, {DIFFERS}{reason}".removeprefix(", "))
        marked.append(row)
    return marked


def _is_comparable(row: Result) -> bool:
    by_same_clock = row.method == (DISCRETE if row.captured_host_us is None else EVENTS)
    is_timed = row.status == OK and row.median_us is not None and bool(row.captured_us)
    return is_timed and by_same_clock and row.mode == EAGER and not row.variant


def _likely_reason(row: Result, case: Case, trace: Trace) -> str:
    is_on_host, call = row.captured_host_us is None, case.signature
    arguments, results = list(tensors([call.args, call.kwargs])), list(tensors(call.outputs))
    on_device = [any(spec.device not in HOST for spec in specs) for specs in (arguments, results)]
    drawn = [
        spec
        for spec in arguments
        if not (spec.dtype.is_floating_point or spec.dtype.is_complex)
        and (spec.values is None or not isinstance(case.values.get(spec.values), Exact | Constant | Stored))
    ]
    applies = {
        "captured time": row.is_captured_doubtful,
        "busy capture": is_on_host and trace.end is not None and trace.end.contended >= CONTENDED,
        "repeated runs": row.dropped > row.samples,
        "waits": on_device == [True, False],
        "short": min(row.captured_us or 0.0, row.median_us or 0.0) < SHORT_US,
        "values": drawn,
        "new memory": is_on_host and (row.bytes_out or 0) >= LARGE and case.fresh != 0,
        "other threads": is_on_host and _ran_with_others(case, trace),
    }
    return next((reason for reason, is_so in applies.items() if is_so), "unknown")


def _ran_with_others(case: Case, trace: Trace) -> bool:
    if trace.own_distinct_calls["thread"].nunique() < 2 or trace.call_count > MOST_CALLS:
        return False
    calls = trace.own_calls.assign(end_ns=lambda calls: calls["start_ns"] + calls["duration_ns"])
    own = calls[calls["signature"] == case.trace_number]
    others = calls[calls["thread"] != own["thread"].iloc[0]].sort_values("start_ns")
    # a call overlaps if one of those that started before its end ended after its start
    started = others["start_ns"].searchsorted(own["end_ns"])
    ends = np.maximum.accumulate([0, *others["end_ns"]])
    return bool((ends[started] > own["start_ns"]).mean() > 0.5)
