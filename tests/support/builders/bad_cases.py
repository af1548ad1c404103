"""Trace of calls that fail in different ways, with good calls between them."""

from __future__ import annotations

from pathlib import Path

import torch
from example_trace import write

from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import EXTENSION, OPERATOR, Calls, End, Record, Scope, Signature

SEGFAULT, ABORT, HANG, EXIT, HUGE = (
    "faulthandler:_sigsegv",
    "posix:abort",
    "time:sleep",
    "posix:_exit",
    "aten.add.Tensor",
)
EXTENSIONS = ("faulthandler", "posix", "time")


def bad_trace(path: Path, goods: int = 3) -> Path:
    """Write a trace with one case of each kind of failure, each after `goods` cases that succeed."""
    vector = TensorSpec((1000,), (1,), torch.float32, "cpu")
    # read as one element, written out as 4 TB
    huge = TensorSpec((1 << 40,), (0,), torch.float32, "cpu")
    bad = [
        (EXTENSION, SEGFAULT, ()),
        (EXTENSION, ABORT, ()),
        (EXTENSION, HANG, (3600,)),
        (EXTENSION, EXIT, (3,)),
        (OPERATOR, HUGE, (huge, 1)),
    ]
    signatures: list[Record] = []
    for kind, op, args in bad:
        for _ in range(goods):
            number = len(signatures)
            scalar = 1.0 + number
            signatures.append(Signature(number, OPERATOR, "aten.mul.Tensor", (vector, scalar), {}, outputs=vector))
        signatures.append(Signature(len(signatures), kind, op, args, {}))
    numbers = list(range(len(signatures)))
    calls = Calls(0, numbers, [0] * len(numbers), [10 * n for n in numbers], [5] * len(numbers))
    records = [Scope(0, "", "", "forward"), *signatures, calls, End(len(numbers), len(numbers), 10 * len(numbers))]
    return write(path, records)
