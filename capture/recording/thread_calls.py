"""Calls of one thread as columns, which are made from the integers that its dispatch mode collected."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from opgrip.capture.timing.page_faults import NONE_OPEN

if TYPE_CHECKING:
    from opgrip.capture.recording.thread_mode import ThreadMode


@dataclass(frozen=True, slots=True)
class ThreadCalls:
    """Some calls of one thread.

    calls : (N, 4), for each call the number of its (signature, scope) pair, start and end in ns, and autograd's
        sequence number
    tensors : (N,), number of tensors of each call
    flows : (sum of `tensors`,), storage numbers of these tensors, call after call
    open_since_ns : start of the first call that had not ended when the last of these calls ended
    """

    mode: ThreadMode
    calls: NDArray[np.int64]
    tensors: NDArray[np.int64]
    flows: NDArray[np.int64]
    open_since_ns: int = NONE_OPEN

    def __len__(self) -> int:
        return len(self.calls)

    def part(self, first: int, stop: int) -> ThreadCalls:
        ends = np.concatenate([[0], np.cumsum(self.tensors)])
        own, flows = slice(first, stop), slice(ends[first], ends[stop])
        open_since_ns = min(self.open_since_ns, int(self.calls[stop:, 1].min(initial=NONE_OPEN)))
        return ThreadCalls(self.mode, self.calls[own], self.tensors[own], self.flows[flows], open_since_ns)

    def selected(self, flags: NDArray[np.bool_]) -> ThreadCalls:
        """Return the calls for which the mask `flags`, (N,), is True."""
        flows = self.flows[np.repeat(flags, self.tensors)]
        return replace(self, calls=self.calls[flags], tensors=self.tensors[flags], flows=flows)

    def copied(self) -> ThreadCalls:
        """Return a copy of these calls, so that larger arrays of which their arrays are views can be freed."""
        return replace(self, calls=self.calls.copy(), tensors=self.tensors.copy(), flows=self.flows.copy())
