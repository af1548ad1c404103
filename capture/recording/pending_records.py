"""Records that wait to be written, and calls that could not be recorded.

Both are shared by all threads, and changed under one lock, the lock of a recording's tables.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from opgrip.capture.torch_compat.torch_private import without_functions, without_modes
from opgrip.errors import interrupted_by, is_from_program, one_line, raise_if_from_program
from opgrip.traces.analysis.redaction import Policy, Redaction
from opgrip.traces.io.writer import encode_line
from opgrip.traces.schema.records import Record


class OwnCalls(threading.local):
    """Whether a thread makes calls of the capture's own, which are not recorded.

    Otherwise a watched function that describing a call needs would wait for itself.

    Attributes
    ----------
    lock : held while it does. It is a lock that no other thread has, since Python enters and leaves one without a
        moment at which an exception could leave it held
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()


class PendingRecords:
    """Encoded records that must be written before the calls that refer to them.

    Parameters
    ----------
    privacy : how records are redacted before they are encoded; None to write them unchanged
    redacts_late : leave redaction and encoding to what writes the records to a file

    Attributes
    ----------
    lock : held while something new is added to the tables of the recording
    lines : records with their encoded lines
    """

    def __init__(self, own_calls: OwnCalls, privacy: Policy | None = None, redacts_late: bool = False) -> None:
        self.lock = threading.RLock()
        self.lines: list[tuple[Record, bytes]] = []
        self._own_calls = own_calls
        self._redaction = None if privacy is None else Redaction(privacy)
        self._redacts_late = redacts_late

    def add(self, record: Record) -> None:
        """Add a record."""
        with self.lock:
            try:
                lines = self.encoded(record)
                # no call and no loop from here on, so that nothing can interrupt it
                self.lines += lines
            except BaseException:
                self.take_back()
                raise

    def encoded(self, record: Record) -> list[tuple[Record, bytes]]:
        """Return what is to be added to `lines` for a record, under the lock; `take_back` if it is not added."""
        # encoded here: at the first call of its kind that costs little, later it would hold up other calls
        with self._own_calls.lock:
            if self._redaction is not None and self._redacts_late:
                return [(record, b"")]
            return [(item, encode_line(item)) for item in self.outgoing(record)]

    def take_back(self) -> None:
        """Forget that the last record was redacted: its value models are then written with the next one."""
        if self._redaction is not None:
            self._redaction.take_back()

    def is_held_here(self) -> bool:
        """Return True if this thread holds the lock, for which the thread that writes may wait."""
        is_held: bool = self.lock._is_owned()  # type: ignore[attr-defined]
        return is_held

    def take(self) -> list[tuple[Record, bytes]]:
        """Remove and return the records that must be written before any call that is known by now."""
        count = len(self.lines)
        taken = self.lines[:count]
        del self.lines[:count]
        return taken

    def outgoing(self, record: Record) -> Sequence[Record]:
        """Return what is written for a record: itself, or what its redaction makes of it."""
        if self._redaction is None:
            return (record,)
        # redaction runs operators on values, which are not calls of the program
        with self.lock, without_modes(), without_functions():
            return self._redaction.records(record)

    @property
    def custom_operators(self) -> list[str]:
        """Operators of the program whose names a private trace has."""
        return [] if self._redaction is None else self._redaction.custom_operators


class LostCalls:
    """Counts of what could not be recorded.

    Attributes
    ----------
    dropped : calls that ran and are not in the trace, by operator and reason
    passed_by : calls that are in the trace as the calls that they were made of, likewise
    without_values : tensors whose values could not be read, likewise
    """

    def __init__(self, lock: threading.RLock) -> None:
        self.dropped: Counter[tuple[str, str]] = Counter()
        self.passed_by: Counter[tuple[str, str]] = Counter()
        self.without_values: Counter[tuple[str, str]] = Counter()
        self._lock = lock

    def drop(self, op: str, reason: BaseException) -> None:
        """Count a call that could not be recorded; raise the reason again if it is an exception of the program."""
        raise_if_from_program(reason)
        self.count(op, one_line(reason))

    def lose(self, op: str, reason: BaseException) -> None:
        """Count a call that ran and whose record could not be made, and raise as `drop` does."""
        is_own = not is_from_program(reason)
        self.count(op, one_line(reason) if is_own else interrupted_by(reason))
        if not is_own:
            raise reason

    def count(self, op: str, reason: str) -> None:
        """Count a call that ran and is not in the trace."""
        with self._lock:
            self.dropped[op, reason] += 1

    def lose_values(self, op: str, reason: Exception) -> None:
        """Count a tensor whose values could not be read, and raise as `drop` does."""
        raise_if_from_program(reason)
        with self._lock:
            self.without_values[op, one_line(reason)] += 1

    def pass_by(self, op: str, types: Sequence[type]) -> None:
        """Count a call that is in the trace as the calls that it was made of."""
        with self._lock:
            self.passed_by[op, f"run by {', '.join(kind.__name__ for kind in types)}"] += 1
