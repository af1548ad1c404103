"""A trace with a record of every type."""

from __future__ import annotations

from pathlib import Path

import torch

from opgrip.traces.arguments import TensorSpec
from opgrip.traces.records import Calls, Dropped, End, Header, Record, Scope, Signature, Thread, Values
from opgrip.traces.values.booleans import Booleans
from opgrip.traces.writer import TraceWriter

SPEC = TensorSpec((2, 3), (3, 1), torch.float32, "cpu", values=0)
RECORDS: list[Record] = [
    Values(0, Booleans(3, 70)),
    Signature(0, "operator", "aten.mul.Tensor", (SPEC, 2.5), {}, SPEC),
    Signature(1, "extension", "mmcv._ext:nms", (SPEC,), {"iou_threshold": 0.7}, raised="ValueError: no"),
    Scope(0, "backbone.überconv", "Conv2d", "forward"),
    Scope(1, "", "", "backward", inside="mmcv._ext:nms"),
    Thread(0, "MainThread"),
    Thread(1, "autograd"),
    Calls(0, [0, 1, 0], [0, 0, 1], [10, 90, 50], [5, 6, 7]),
    Calls(1, [0], [1], [70], [8]),
    End(4, 2, 100, [Dropped("aten.x", "ValueError: no", 2)]),
]


def write(path: Path, records: list[Record] = RECORDS) -> Path:
    with TraceWriter(path, Header({"torch": "2.13.0", "model": {"name": "m"}}), force=True) as writer:
        for record in records:
            writer.write(record)
    return path
