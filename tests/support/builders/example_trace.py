"""Trace with a record of every type, and small traces that are fast to replay."""

from pathlib import Path

import torch

from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.arguments import GroupSpec, ReductionSpec, TensorSpec
from opgrip.traces.schema.records import (
    EXTENSION,
    NO_STORAGE,
    OPERATOR,
    Calls,
    Context,
    DeviceTimes,
    Dropped,
    End,
    Entered,
    Header,
    Kernels,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
    Wait,
)
from opgrip.traces.values.exact import Booleans

SPEC = TensorSpec((2, 3), (3, 1), torch.float32, "cpu", values=0)
GROUP = GroupSpec("0", "gloo", (0, 1), 1)
REDUCTION = ReductionSpec("SUM")
RECORDS: list[Record] = [
    Values(0, Booleans(3, 70)),
    Signature(0, "operator", "aten.mul.Tensor", (SPEC, 2.5), {}, SPEC),
    Signature(1, "extension", "mmcv._ext:nms", (SPEC,), {"iou_threshold": 0.7}, raised="ValueError: no"),
    Scope(0, "backbone.überconv", "Conv2d", "forward"),
    Context(0, {"grad": True, "threads": 2, "autocast": "cpu:bfloat16"}),
    Scope(
        *(1, "", "", "backward", "mmcv._ext:nms", "Net.forward", "nets.py", 7),
        *(("train.py:3 main",), 0, 0),
    ),
    Thread(0, "MainThread"),
    Thread(1, "autograd"),
    Calls(0, [0, 1, 0], [0, 0, 1], [10, 90, 50], [5, 6, 7], [2, 1, 2], [0, 1, 1, 2000, NO_STORAGE]),
    Calls(1, [0], [1], [70], [8], [2], [1, 2001], 2000, [], [(0, 12)], [35]),
    DeviceTimes(0, 1, [700, -1]),
    Wait(70, "cuda:0", 7, "cuda:0", 0, 60),
    Kernels(0, ["void mul_kernel<float>()", "Memset"], [1, 2], [650, 50]),
    Entered(0, 90, 0, 1),
    Entered(1, 80, 1, 2, Signature(2, "operator", "c10d.barrier.default", (GROUP, REDUCTION), {})),
    End(4, 2, 100, [Dropped("aten.x", "ValueError: no", 2)], [Dropped("aten.y", "run by Twice", 1)], stopped="4 calls"),
]


def write(path: Path, records: list[Record] = RECORDS, **header: object) -> Path:
    with TraceWriter(path, Header({"torch": "2.13.0", "model": {"name": "m"}, **header}), force=True) as writer:
        for record in records:
            writer.write(record)
    return path


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
