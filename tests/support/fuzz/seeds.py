"""Small real traces with every form of record, as seeds of mutants."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from example_trace import write
from made_ranks import make_rank
from programs import ROOT, train_tiny_net
from torch import nn
from unusual_tensors import UNUSUAL

from opgrip.capture import Capture
from opgrip.traces.analysis.merge import merge

Line = dict[str, Any]

FUNCTION_ARGUMENTS: list[Any] = [
    {"object": {"class": "m:Coder", "fields": {"scale": 2.0}, "content": {"tuple": [1, 2]}}},
    {
        "module": {
            "class": "torch.nn.modules.linear:Linear",
            "parameters": {},
            "buffers": {},
            "modules": {},
            "fields": {},
        }
    },
    {"numpy_scalar": {"dtype": "float32", "value": 0.5}},
    {"named": "m:Color.RED"},
    {"shared": {"id": 0, "value": [{"same": 0}]}},
    {"set": [1, 2, {"complex": [1.0, {"float": "nan"}]}]},
    {"frozenset": ["a"]},
    {"slice": [1, None, 2]},
    {"range": [0, 9, 1]},
    {"bytes": "AAAA"},
    {"ellipsis": True},
    {"dict": [["key", {"tuple": []}], [1, {"size": [2, 3]}]]},
    {"dtype": "float32"},
    {"device": "cpu"},
    {"layout": "strided"},
    {"memory_format": "channels_last"},
    {"generator": {"device": "cpu", "seed": 0}},
    {"opaque": "type"},
]


def make_seeds(folder: Path) -> list[list[Line]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train_tiny_net(folder / "tiny.jsonl")
        with Capture(folder / "program.jsonl"):
            _program()
    write(folder / "records.jsonl")
    shipped = _lines(ROOT / "traces" / "faster_rcnn.jsonl")
    kept = [line for line in shipped if line["type"] not in ("calls", "end")][:150]
    seeds = [*(_lines(folder / f"{name}.jsonl") for name in ("tiny", "program", "records")), kept + _calls_of(kept)]
    header = {**seeds[0][0], "model": {"name": "m", "class": "M", "source": "m.py", "run": "train"}, "steps": 1}
    scope = {"type": "scope", "id": 0, "module": "", "module_type": "", "phase": "forward"}
    gripped = {"type": "signature", "id": 0, "kind": "function", "op": "m:f", "args": FUNCTION_ARGUMENTS}
    effects = {"type": "effects", "signature": 0, "operators": 3, "operator_ns": 9}
    seeds.append([header, scope, gripped, effects, *_calls_of([scope, gripped])])
    seeds.append(_lines(_merged_ranks(folder)))
    return seeds


def _merged_ranks(folder: Path) -> Path:
    paths = [make_rank(folder / f"rank{rank}.jsonl", rank, 2, 40, slow=1, every=4) for rank in range(2)]
    merge(paths, folder / "ranks.jsonl", force=True)
    return folder / "ranks.jsonl"


def _program() -> None:
    x = torch.randn(40, 6)
    for name in ("coo", "csr", "quint8", "nested"):
        torch.relu(UNUSUAL[name]())
    table = nn.Embedding(20, 4, sparse=True)
    table(torch.randint(0, 20, (30,))).sum().backward()
    mask = x > 0
    x[mask].sort()
    torch.nonzero(mask[:, 0])
    x.index_select(0, torch.arange(0, 40, 2)).softmax(-1).cumsum(0)
    torch.stack([x, x.flip(0)]).transpose(1, 2).reshape(-1).unique()
    torch.linalg.cholesky(x.T @ x + 10 * torch.eye(6))
    torch.empty(3).set_(x)
    torch.empty(3).set_(x.untyped_storage(), 2, (3,), (1,))
    weight = torch.quantize_per_tensor(torch.randn(4, 6, 1, 1), 0.1, 0, torch.qint8)
    packed = torch.ops.quantized.conv2d_prepack(weight, None, [1, 1], [0, 0], [1, 1], 1)
    torch.ops.quantized.conv2d(torch.quantize_per_tensor(x[:, :, None, None], 0.1, 0, torch.quint8), packed, 0.2, 0)


def _lines(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def _calls_of(lines: list[Line]) -> list[Line]:
    signatures = [line["id"] for line in lines if line["type"] == "signature"]
    scope = next((line["id"] for line in lines if line["type"] == "scope"), 0)
    count = len(signatures)
    block = {
        "type": "calls",
        "thread": 0,
        "start_ns": 0,
        "signature": signatures,
        "scope": [scope] * count,
        "after_ns": [0, *[9] * (count - 1)],
        "duration_ns": [5] * count,
    }
    return [block, {"type": "end", "calls": count, "signatures": count, "duration_ns": 9 * count, "dropped": []}]
