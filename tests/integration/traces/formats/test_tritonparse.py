"""Tests of reading tritonparse's launches as traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from opgrip.traces import Trace, TraceReader, load
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.operator_arguments import is_launch, launch_facts

TENSOR = {"type": "tensor", "shape": [8, 4], "dtype": "torch.float16", "device": "cuda:0", "stride": [1, 8]}
CODE = "@triton.jit\ndef scale(x, out, count, BLOCK: tl.constexpr, KIND: 'tl.constexpr'):\n    pass\n"
COMPILATION = {
    "event_type": "compilation",
    "payload": {
        "metadata": {"hash": "7f", "name": "scale"},
        "python_source": {"file_path": "/home/a/kernels.py", "code": CODE},
    },
}
TRITON = "/usr/lib/site-packages/triton/runtime"
STACK = [
    {"line": 3, "name": "<module>", "filename": "/home/a/train.py", "loc": "main()"},
    {"line": 12, "name": "main", "filename": "/home/a/train.py", "loc": "scale[grid](x)"},
    {"line": 370, "name": "<lambda>", "filename": f"{TRITON}/jit.py", "loc": "return"},
    {"line": 40, "name": "convert", "filename": "/home/a/structured_logging.py", "loc": "stack"},
]
LAUNCH: dict[str, Any] = {
    "event_type": "launch",
    "pid": 7,
    "name": "scale",
    "grid": [4, 2],
    "compilation_metadata": {"hash": "7f", "num_warps": 4, "num_stages": 2, "num_ctas": 1, "maxnreg": None},
    "extracted_args": {
        "x": {**TENSOR, "storage_offset": 0, "data_ptr": "0x7f0000000000"},
        "out": {**TENSOR, "storage_offset": 2, "data_ptr": "0x7f0000000004"},
        "count": {"type": "int", "value": 32},
        "BLOCK": {"type": "int", "value": 16},
        "KIND": {"type": "dtype", "repr": "bf16"},
    },
    "stack": STACK,
}


def trace_of(path: Path, *events: Any) -> tuple[Trace, TraceReader]:
    path.write_text("".join(event if isinstance(event, str) else f"{json.dumps(event)}\n" for event in events))
    reader = TraceReader(path)
    return load(path, reader=reader), reader


def test_launches_have_grid_constants_options_and_scope(tmp_path: Path) -> None:
    trace, _ = trace_of(tmp_path / "log.ndjson", COMPILATION, LAUNCH, LAUNCH)
    (signature,) = trace.signatures
    assert (signature.op, len(trace.calls)) == ("kernels:scale", 2)
    assert is_launch(signature)
    facts = {"grid": (4, 2), "BLOCK": 16, "KIND": torch.bfloat16, "num_warps": 4, "num_stages": 2, "num_ctas": 1}
    assert launch_facts(signature) == facts
    x, out, count = signature.args
    assert (x, count) == (TensorSpec((8, 4), (1, 8), torch.float16, "cuda:0", storage=0), 32)
    # both begin at the same address
    assert (out.storage, out.offset) == (0, 2)
    assert trace.calls[["file", "line", "function"]].iloc[0].tolist() == ["/home/a/train.py", 12, "main"]


def test_trial_launches_of_the_autotuner_are_counted_separately(tmp_path: Path) -> None:
    tuning = [*STACK[:2], {"line": 164, "name": "_bench", "filename": f"{TRITON}/autotuner.py"}, *STACK[2:]]
    parsed = {**LAUNCH, "autotune_launch_type": "benchmark"}
    trace, reader = trace_of(tmp_path / "log.ndjson", COMPILATION, {**LAUNCH, "stack": tuning}, parsed, LAUNCH)
    assert len(trace.calls) == 1
    ((name, reason),) = reader.losses.skipped
    assert (name, "autotuner" in reason, reader.losses.skipped[name, reason]) == ("scale", True, 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"extracted_args": {"_note": "argument extraction skipped during CUDA graph capture"}},
            "argument _note has no type",
        ),
        (
            {"extracted_args": {"f": {"type": "function", "repr": "<function f>"}}},
            "the kernel's argument f, a function",
        ),
        ({"extracted_args": {"x": {**TENSOR, "stride": [1]}}}, "strides or offset do not fit"),
        ({"extracted_args": {"BLOCK": TENSOR}}, "a tensor is passed for a constexpr argument"),
        ({"extracted_args": {"n": {"type": "int", "value": 1 << 70}}}, "64 bits"),
        ({"grid": [1 << 40]}, "grid"),
    ],
)
def test_launches_that_cannot_be_repeated_are_counted(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    trace, reader = trace_of(tmp_path / "log.ndjson", COMPILATION, {**LAUNCH, **change})
    assert trace.calls.empty
    ((_, told),) = reader.losses.skipped
    assert reason in told


def test_broken_lines_and_unknown_kernels_are_skipped(tmp_path: Path) -> None:
    broken = '{"event_type": "launch", "na{"event_type": "launch"\n'
    other = {**LAUNCH, "compilation_metadata": {"hash": "80"}}
    trace, reader = trace_of(tmp_path / "log.ndjson", COMPILATION, broken, other)
    assert [item.op for item in trace.signatures] == ["train:scale"]
    assert dict(reader.losses.skipped) == {("?", "a line is not JSON"): 1}


def test_log_with_compilations_only_explains_how_to_log_launches(tmp_path: Path) -> None:
    trace, reader = trace_of(tmp_path / "log.ndjson", COMPILATION)
    assert trace.calls.empty
    ((name, reason),) = reader.losses.skipped
    assert (name, "enable_trace_launch=True" in reason) == ("scale", True)
