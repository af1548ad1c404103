"""What has to be known of all calls of a trace before a part of them can be written."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opgrip.errors import UserError
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.schema.arguments import numbers_of, tensors
from opgrip.traces.schema.mutated_arguments import written
from opgrip.traces.schema.records import Calls, Effects, End, Header, Observed, Scope, Signature
from opgrip.traces.table.profiler_labels import is_mark
from opgrip.traces.table.step_starts import reported_starts

COLUMNS = ("thread", "signature", "scope", "start_ns", "tensors")


@dataclass(frozen=True, slots=True)
class SignatureOutline:
    """Of a signature, what decides about its calls.

    Attributes
    ----------
    values : numbers of the value models that it refers to
    written : whether a call may write into each of the tensors among its arguments
    """

    kind: str
    op: str
    values: tuple[int, ...]
    written: tuple[bool, ...]


@dataclass(slots=True)
class Outline:
    """The calls of a trace in the order of the file, and what they refer to.

    Attributes
    ----------
    thread, signature, scope, start_ns, tensors : (calls,)
    storages : of all calls, `tensors` numbers of each
    first_storage : (calls,), where those of each begin
    observed : of each record, what it stands for
    step_starts_ns : (steps,), as the trace's end has it
    """

    header: dict[str, Any] = field(default_factory=dict)
    signatures: dict[int, SignatureOutline] = field(default_factory=dict)
    scopes: dict[int, Scope] = field(default_factory=dict)
    observed: list[Observed] = field(default_factory=list)
    effects: dict[int, tuple[int, ...]] = field(default_factory=dict)
    thread: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    signature: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    scope: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    start_ns: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    tensors: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    storages: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    step_starts_ns: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def first_storage(self) -> NDArray[np.int64]:
        """Where the storages of each call begin."""
        first: NDArray[np.int64] = np.cumsum(self.tensors) - self.tensors
        return first

    def op_of(self, signature: int) -> str:
        """The operator of a signature; empty where the trace does not hold it."""
        item = self.signatures.get(signature)
        return "" if item is None else item.op

    def phase_of(self, scope: int) -> str:
        """The phase of a scope."""
        record = self.scopes.get(scope)
        return "" if record is None else record.phase

    def module_of(self, scope: int) -> str:
        """The module of a scope; of one in a backward pass, that of the forward calls that caused it."""
        record = self.scopes.get(scope)
        if record is None:
            return ""
        return self.scopes.get(record.forward, record).module if record.forward is not None else record.module


def read_outline(reader: TraceReader, partial: bool) -> Outline:
    """One pass over a trace.

    Raises
    ------
    UserError : where it is cut or damaged and `partial` is false, or holds no calls
    """
    outline = Outline()
    end: End | None = None
    columns = {name: array("q") for name in (*COLUMNS, "storages")}
    for record in reader:
        match record:
            case Header():
                outline.header = record.fields
            case Signature():
                outline.signatures[record.number] = _outline(record)
            case Scope():
                outline.scopes[record.number] = record
            case Observed():
                outline.observed.append(record)
            case Effects():
                outline.effects[record.signature] = tuple(_present(numbers_of((record.after, record.random_state))))
            case Calls():
                _add_block(columns, record)
            case End():
                end = record
    if reader.missing and not partial:
        raise UserError(reader.missing, "trim what there is with --partial")
    for name, numbers in columns.items():
        setattr(outline, name, np.frombuffer(numbers, dtype=np.int64) if numbers else np.empty(0, dtype=np.int64))
    if not len(outline.start_ns):
        raise UserError(f"{reader.path} holds no calls", "capture a program that runs some")
    marks = [number for number, item in outline.signatures.items() if is_mark(item.op)]
    own = outline.start_ns[~np.isin(outline.signature, marks)]
    outline.step_starts_ns = reported_starts(end, int(own.max(initial=0)))
    return outline


def _add_block(columns: dict[str, array[int]], block: Calls) -> None:
    count = len(block.signature)
    columns["thread"].extend([block.thread] * count)
    columns["signature"].extend(block.signature)
    columns["scope"].extend(block.scope)
    columns["start_ns"].extend(block.start_ns)
    columns["tensors"].extend(block.tensors or [0] * count)
    columns["storages"].extend(block.storages if block.tensors else ())


def _outline(record: Signature) -> SignatureOutline:
    values = _present(numbers_of([record.args, record.kwargs, record.outputs]))
    flags = written(record) if any(True for _ in tensors([record.args, record.kwargs])) else []
    return SignatureOutline(record.kind, record.op, tuple(values), tuple(flags))


def _present(numbers: list[int | None]) -> Iterator[int]:
    return (number for number in numbers if number is not None)
