"""Keeps what the hooks see: numbers for what is met again, a few integers a call, and the way to the file."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter_ns, sleep
from typing import Any

import torch

from opgrip.capture.signatures import call_key, describe_call, describe_result
from opgrip.capture.torch_private import current_autograd_node, unobserved
from opgrip.traces import values
from opgrip.traces.arguments import Opaque
from opgrip.traces.records import Calls, Dropped, End, Record, Scope, Signature, Thread, Values
from opgrip.traces.values import ValueModel
from opgrip.traces.writer import TraceWriter, encode_line

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
NOT_RECORDED = -1
BLOCK = 512
"""Calls in one record."""
COLUMNS = 5
"""Integers kept a call: signature, scope, thread, start, duration."""

Place = tuple[str, str]
"""Path and class of a module."""


class Recorder:
    """One capture's tables and buffers. Nothing here raises into the program that is watched.

    A call is `enter`ed, runs, and is `leave`d. Its scope is the present `place` (module), `optimizing` and `inside`
    (extension function), which the hooks that know them set.
    """

    def __init__(self, writer: TraceWriter) -> None:
        self.writer = writer
        self.started_ns = perf_counter_ns()
        self.place: Place = ("", "")
        self.optimizing = 0
        self.inside: str | None = None
        self.failure: Exception | None = None
        self.discarded = False
        self.dropped: Counter[tuple[str, str]] = Counter()
        self.without_values: Counter[tuple[str, str]] = Counter()
        self.calls_written = 0
        self._signatures_written = 0
        self._pid = os.getpid()
        self._signatures: dict[Hashable, int] = {}
        self._open: dict[int, Signature] = {}
        self._scopes: dict[tuple[Place, str, str | None], int] = {}
        self._values: dict[str, int] = {}
        self._threads: dict[int, int] = {}
        # already encoded: at a signature's first call that costs little, later it would hold up other calls
        self._pending: list[bytes] = []
        # one flat list: extending it by a call is a single step that no other thread can come into
        self._calls: list[int] = []
        self._own_work: set[int] = set()
        self._new = threading.Lock()
        self._writing = threading.Lock()

    @property
    def signatures(self) -> int:
        """How many distinct signatures were met."""
        return len(self._signatures)

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """What this thread calls in the block is the capture's own, and not recorded.

        Else a watched function that describing a call needs would wait for itself.
        """
        ident = threading.get_ident()
        outermost = ident not in self._own_work
        self._own_work.add(ident)
        try:
            yield
        finally:
            if outermost:
                self._own_work.discard(ident)

    def at_own_work(self) -> bool:
        """Whether this thread is inside an `own_work` block."""
        return threading.get_ident() in self._own_work

    def enter(self, name: Hashable, kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """The number of a call's signature, to be asked for before it runs; `NOT_RECORDED` where that failed.

        Parameters
        ----------
        name : what `str` turns into the operator's name
        """
        try:
            key = call_key(name, args, kwargs)
            number = self._signatures.get(key)
            return self._add_signature(key, kind, args, kwargs) if number is None else number
        except Exception as error:
            self.drop(str(name), error)
            return NOT_RECORDED

    def leave(self, signature: int, start_ns: int, end_ns: int, result: Any, raised: BaseException | None) -> None:
        """Keep an entered call that has returned, or raised."""
        try:
            if signature in self._open:
                self._close_signature(signature, result, raised)
            scope = self._scope()
            self._calls.extend((signature, scope, threading.get_ident(), start_ns, end_ns - start_ns))
        except Exception as error:
            self.drop(f"signature {signature}", error)

    def drop(self, op: str, reason: Exception) -> None:
        """Count a call that could not be recorded."""
        self.dropped[op, _one_line(reason)] += 1

    def flush(self, pause_s: float = 0.0) -> None:
        """Write what has come since the last time. Does nothing in a forked child, whose file is the parent's.

        Parameters
        ----------
        pause_s : rest after each block of calls, so that the program's thread never waits long for Python's lock:
            writing in one go would lengthen a call that it meets by the interpreter's switch interval of 5 ms
        """
        if os.getpid() != self._pid or self.failure is not None:
            return
        with self._writing:
            try:
                while self._calls or self._pending:
                    # calls first, then records: what a call refers to is always in the second
                    count = min(len(self._calls), BLOCK * COLUMNS)
                    calls = self._calls[:count]
                    del self._calls[:count]
                    self.writer.write_lines(self._take_pending())
                    for record in self._blocks(calls):
                        self.writer.write(record)
                    if pause_s:
                        sleep(pause_s)
                self.writer.flush()
            except Exception as error:
                self.failure = error

    def finish(self) -> None:
        """Write all that is left and the closing record; or leave no file, where the capture was discarded."""
        if self.discarded and os.getpid() == self._pid:
            self.writer.discard()
            return
        self.flush()
        if self.failure is not None or os.getpid() != self._pid:
            return
        end = End(
            calls=self.calls_written,
            signatures=self._signatures_written,
            duration_ns=perf_counter_ns() - self.started_ns,
            dropped=_listed(self.dropped),
            without_values=_listed(self.without_values),
        )
        try:
            self.writer.write(end)
            self.writer.close()
        except Exception as error:
            self.failure = error

    def _add_signature(self, key: tuple[Any, ...], kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        op = str(key[0])
        with self._new, self.own_work(), unobserved():
            described_args, described_kwargs = describe_call(args, kwargs, self._fitter(op))
            number = self._signatures.setdefault(key, len(self._signatures))
            self._open[number] = Signature(number, kind, op, described_args, described_kwargs)
        return number

    def _close_signature(self, number: int, result: Any, raised: BaseException | None) -> None:
        signature = self._open.pop(number, None)
        if signature is None:
            return
        if raised is not None:
            signature = replace(signature, raised=_one_line(raised))
        else:
            signature = replace(signature, outputs=self._outputs(result))
        self._pend(signature)
        self._signatures_written += 1

    def _outputs(self, result: Any) -> Any:
        try:
            with self.own_work(), unobserved():
                return describe_result(result)
        except Exception as error:
            # without its outputs, a signature still replays
            return Opaque(_one_line(error))

    def _fitter(self, op: str) -> Callable[[torch.Tensor], int | None]:
        def fit(tensor: torch.Tensor) -> int | None:
            try:
                model = values.fit(tensor)
            except Exception as error:
                self.without_values[op, _one_line(error)] += 1
                return None
            return None if model is None else self._value_number(model)

        return fit

    def _value_number(self, model: ValueModel) -> int:
        # by its text: nan makes equal models unequal
        text = repr(model)
        number = self._values.get(text)
        if number is None:
            number = self._values[text] = len(self._values)
            self._pend(Values(number, model))
        return number

    def _scope(self) -> int:
        phase = OPTIMIZER if self.optimizing else FORWARD
        if current_autograd_node() is not None:
            phase = BACKWARD
        key = (self.place, phase, self.inside)
        number = self._scopes.get(key)
        if number is None:
            number = self._scopes.setdefault(key, len(self._scopes))
            self._pend(Scope(number, *self.place, phase, self.inside))
        return number

    def _pend(self, record: Record) -> None:
        with self.own_work():
            self._pending.append(encode_line(record))

    def _take_pending(self) -> bytes:
        count = len(self._pending)
        lines = b"".join(self._pending[:count])
        del self._pending[:count]
        return lines

    def _blocks(self, calls: list[int]) -> Iterator[Record]:
        """Records of these calls, one for each thread, and of threads that are new."""
        idents = calls[2::COLUMNS]
        for ident in dict.fromkeys(idents):
            if ident not in self._threads:
                # the engine's own threads are not Python's
                names = {thread.ident: thread.name for thread in threading.enumerate()}
                self._threads[ident] = len(self._threads)
                yield Thread(self._threads[ident], names.get(ident, "autograd"))
            rows = [row for row, owner in enumerate(idents) if owner == ident]
            signature, scope, start, duration = (
                [calls[row * COLUMNS + place] for row in rows] for place in (0, 1, 3, 4)
            )
            starts = [time - self.started_ns for time in start]
            yield Calls(self._threads[ident], signature, scope, starts, duration)
        self.calls_written += len(idents)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def _listed(counts: Counter[tuple[str, str]]) -> list[Dropped]:
    return [Dropped(op, reason, count) for (op, reason), count in sorted(counts.items())]
