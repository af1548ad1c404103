"""Operator configurations of PARAM, and the traces that they become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from opgrip.cli.option_types import Cut
from opgrip.traces import Trace, TraceReader, load
from opgrip.traces.schema.arguments import TensorSpec

GENERATOR = "PyTorch:DefaultDataGenerator"
RANGES = "RangeConfigIterator"


def tensor(*shape: Any, dtype: str = "float", **others: Any) -> dict[str, Any]:
    return {"type": "tensor", "dtype": dtype, "shape": list(shape), **others}


def ranged(*shape: Any, **others: Any) -> dict[str, Any]:
    return tensor(*shape, __range__=["shape"], **others)


def number(value: Any, kind: str = "int", **others: Any) -> dict[str, Any]:
    return {"type": kind, "value": value, **others}


def operator(*inputs: Any, build: Any = None, **others: Any) -> dict[str, Any]:
    config = {"input": list(inputs)} | ({"build": build} if build is not None else {})
    return {"input_data_generator": GENERATOR, "config": [config], **others}


def entry(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"args": list(args), "kwargs": kwargs}


def read(path: Path, operators: Any, cut: Cut = Cut()) -> Trace:
    path = path / "config.json"
    path.write_text(json.dumps(operators))
    return load(path, reader=TraceReader(path, cut=cut))


def shapes(trace: Trace) -> list[list[tuple[int, ...]]]:
    return [[arg.shape for arg in signature.args if isinstance(arg, TensorSpec)] for signature in trace.signatures]


def reasons(trace: Trace) -> list[str]:
    assert trace.end is not None
    return [item.reason for item in trace.end.dropped]
