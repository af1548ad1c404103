"""Program that both torch's observer and a capture record, and handwritten execution traces."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ExecutionTraceObserver

from opgrip.capture import Capture
from opgrip.traces import Trace
from opgrip.traces.analysis.dataflow import make_graph
from opgrip.traces.schema.arguments import TensorSpec, map_leaves
from opgrip.traces.table.profiler_labels import is_mark

# Operators that autograd calls only while a mode is active; otherwise it runs their kernels directly.
SILENT = "aten.detach.default"


def make_program() -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # the observer sees the operators inside of torch.tensor, a capture does not
    labels = torch.tensor([1, 0])

    def program() -> None:
        inputs = torch.randn(2, 3, 8, 8)
        with torch.profiler.record_function("model"):
            outputs = model(inputs * 2.5)
        outputs[labels].sum()
        torch.nonzero(outputs > 0)
        loss = nn.functional.cross_entropy(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        nn.functional.layer_norm(outputs.to(torch.bfloat16), (4,), eps=1e-12)
        torch.full((2,), float("-inf"))
        torch.zeros(2, dtype=torch.float16, device="cpu")
        torch.cat([torch.ones(1), torch.ones(2)])
        torch.arange(0, 5, dtype=torch.int16)
        torch.empty(2).uniform_(0, 1)
        torch.ones(2, dtype=torch.int8) + torch.ones(2, dtype=torch.int32)

    program()
    return program


def observe(program: Callable[[], None], path: Path) -> None:
    observer = ExecutionTraceObserver()
    observer.register_callback(str(path))
    observer.start()
    program()
    observer.stop()
    observer.unregister_callback()


def capture(program: Callable[[], None], path: Path) -> None:
    with Capture(path):
        program()


def calls_of(trace: Trace) -> list[tuple[str, str, str]]:
    """Return the operator, the arguments as text, and the phase of each call, as far as an execution trace has them."""
    signatures = {item.number: item for item in trace.signatures}
    rows = zip(trace.calls["signature"], trace.calls["phase"], strict=True)
    calls = [(signatures[number], phase) for number, phase in rows]
    return [
        (item.op, str(map_leaves(_told, [*item.args, item.kwargs])), phase)
        for item, phase in calls
        if not is_mark(item.op) and item.op != SILENT
    ]


def dependencies_of(trace: Trace) -> list[tuple[int, int]]:
    """Return pairs of calls of which the first uses a tensor that the second created or wrote, as indices in
    `calls_of`.
    """
    graph = make_graph(trace)
    steps = [step for step in graph.steps.values() if step.op != SILENT]
    place = {step.number: index for index, step in enumerate(steps)}
    return [(place[step.number], place[before]) for step in steps for before in step.after if before in place]


def _told(leaf: Any) -> Any:
    """Return those properties of an argument that an execution trace records.

    An execution trace records a number like a tensor without dimensions, so both become `number`.
    """
    if isinstance(leaf, TensorSpec):
        return (leaf.shape, leaf.stride, leaf.dtype, leaf.device, leaf.offset) if leaf.shape else "number"
    return "number" if type(leaf) in (int, float) else leaf


def node(number: int, parent: int, name: str, schema: str = "", **fields: Any) -> dict[str, Any]:
    """Return a node of schema 1.1.1; `inputs` and `outputs` are (value, shape, type, stride) each."""
    ports = {}
    for side in ("inputs", "outputs"):
        columns = list(zip(*fields.pop(side, []), strict=True)) or [(), (), (), ()]
        ports[side] = dict(zip(("values", "shapes", "types", "strides"), map(list, columns), strict=True))
    attributes = {"scope": 0 if schema else 7, "tid": 1, "op_schema": schema, **fields.pop("attributes", {})}
    attrs = [{"name": key, "type": "", "value": value} for key, value in attributes.items()]
    return {"id": number, "name": name, "ctrl_deps": parent, **ports, "attrs": attrs, **fields}


def tensor(number: int, storage: int, shape: list[int], stride: list[int], kind: str = "float") -> tuple[Any, ...]:
    return [number, storage, 0, 4, 4, "cpu"], shape, f"Tensor({kind})", stride


def write_nodes(path: Path, nodes: list[dict[str, Any]], schema: str = "1.1.1-chakra.0.0.4") -> Path:
    thread = node(2, 1, "[pytorch|profiler|execution_trace|thread]")
    process = node(1, 1, "[pytorch|profiler|execution_trace|process]")
    facts = {"schema": schema, "pid": 7, "time": "2026-01-02 03:04:05", "start_ts": 1}
    path.write_text(json.dumps({**facts, "nodes": [thread, *nodes, process], "finish_ts": 2}))
    return path
