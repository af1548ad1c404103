"""Records that wait to be written, and counts of calls that could not be recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from threading import RLock, local

from opgrip.capture.torch_compat.torch_private import is_fake
from opgrip.errors import interrupted_by, is_from_program, one_line, raise_if_from_program
from opgrip.traces.analysis.redaction import Policy, Redaction
from opgrip.traces.io.writer import encode_line
from opgrip.traces.schema.records import ON_FAKE, Record


class OwnCalls(local):
    """Marks a thread while it runs operators for the capture itself, which are not recorded."""

    def __init__(self) -> None:
        self.lock = RLock()


class PendingRecords:
    """Records that must be written before the calls that refer to them."""

    def __init__(self, own_calls: OwnCalls, privacy: Policy | None = None, redacts_late: bool = False) -> None:
        self.lock = RLock()
        self.lines: list[tuple[Record, bytes]] = []
        self._own_calls = own_calls
        self._redaction = None if privacy is None else Redaction(privacy)
        self._redacts_late = redacts_late

    def add(self, record: Record) -> None:
        with self.lock:
            lines = self.encoded(record)
            # No call and no loop may follow, so that nothing can interrupt this.
            self.lines += lines

    def encoded(self, record: Record) -> list[tuple[Record, bytes]]:
        # Encode now: at the first call of its kind this costs little, later it would delay other calls.
        with self._own_calls.lock:
            if self._redaction is not None and self._redacts_late:
                return [(record, b"")]
            return [(item, encode_line(item)) for item in self.outgoing(record)]

    def is_held_here(self) -> bool:
        is_held: bool = self.lock._is_owned()  # type: ignore[attr-defined]
        return is_held

    def take(self) -> list[tuple[Record, bytes]]:
        count = len(self.lines)
        lines = self.lines[:count]
        del self.lines[:count]
        return lines

    def outgoing(self, record: Record) -> Sequence[Record]:
        if self._redaction is None:
            return (record,)
        with self.lock:
            return self._redaction.records(record)

    @property
    def custom_operators(self) -> list[str]:
        return [] if self._redaction is None else self._redaction.custom_operators


class LostCalls:
    """Counts of calls and tensor values that are not in the trace, by operator and reason.

    passed_by : calls that are missing although the calls inside them are in the trace
    without_work : calls on meta or fake tensors
    """

    def __init__(self, lock: RLock) -> None:
        self.dropped: Counter[tuple[str, str]] = Counter()
        self.passed_by: Counter[tuple[str, str]] = Counter()
        self.without_values: Counter[tuple[str, str]] = Counter()
        self.without_work: Counter[tuple[str, str]] = Counter()
        self._lock = lock

    def drop(self, op: str, reason: BaseException) -> None:
        """Count a call that could not be recorded; if `reason` is an error of the program, raise it again instead."""
        raise_if_from_program(reason)
        self.count(op, one_line(reason))

    def lose(self, op: str, reason: BaseException) -> None:
        """Count a call that ran but could not be described; raise `reason` again if it is an error of the program."""
        is_own = not is_from_program(reason)
        self.count(op, one_line(reason) if is_own else interrupted_by(reason))
        if not is_own:
            raise reason

    def count(self, op: str, reason: str) -> None:
        with self._lock:
            self.dropped[op, reason] += 1

    def lose_values(self, op: str, reason: Exception) -> None:
        raise_if_from_program(reason)
        with self._lock:
            self.without_values[op, one_line(reason)] += 1

    def count_without_work(self, op: str, reason: str) -> None:
        with self._lock:
            self.without_work[op, reason] += 1

    def pass_by(self, op: str, types: Sequence[type]) -> None:
        with self._lock:
            if any(map(is_fake, types)):
                self.without_work[op, ON_FAKE] += 1
                return
            self.passed_by[op, f"run by {', '.join(kind.__name__ for kind in types)}"] += 1
