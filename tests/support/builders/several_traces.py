"""Folders of traces that are fast to replay."""

from __future__ import annotations

from pathlib import Path

import torch
from example_trace import write

from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import EXTENSION, OPERATOR, Calls, End, Record, Scope, Signature


def small_trace(path: Path, sizes: tuple[int, ...] = (10, 1000), extension: str | None = None) -> Path:
    """Write a trace of additions of vectors of these sizes, and of the function `extension`; each is called twice."""
    signatures: list[Record] = []
    for size in sizes:
        vector = TensorSpec((size,), (1,), torch.float32, "cpu")
        signatures.append(Signature(len(signatures), OPERATOR, "aten.add.Tensor", (vector, 1.5), {}, outputs=vector))
    if extension is not None:
        signatures.append(Signature(len(signatures), EXTENSION, extension, (), {}))
    numbers = [number for number in range(len(signatures)) for _ in range(2)]
    starts, durations = [100_000 * place for place in range(len(numbers))], [20_000] * len(numbers)
    calls = Calls(0, numbers, [0] * len(numbers), starts, durations)
    end = End(len(numbers), len(signatures), 100_000 * len(numbers))
    return write(path, [Scope(0, "", "", "forward"), *signatures, calls, end])
