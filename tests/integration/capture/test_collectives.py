"""Tests of recorded collectives: they contain what recreates them, such as a group's members besides its name."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_python
from torch import distributed

from opgrip.capture import Capture
from opgrip.capture.hooks.scopes import UNSEEN_RPC, UNSEEN_THREAD
from opgrip.capture.torch_compat.torch_private import private_places
from opgrip.tools.verbs.trace_info import facts
from opgrip.traces import load
from opgrip.traces.schema.arguments import GroupSpec

needs_groups = pytest.mark.skipif(
    private_places()["torch.distributed.distributed_c10d._resolve_process_group"] != "found",
    reason="this torch does not name groups",
)


@pytest.fixture
def group() -> Iterator[Any]:
    """Yield a process group that consists of this process only."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def groups_in(path: Path) -> dict[str, object]:
    """Return the last argument of each collective, by operator."""
    return {item.op: item.args[-1] for item in load(path, partial=False).signatures if "c10d" in item.op}


@needs_groups
def test_functional_collective_is_recorded_with_its_group(tmp_path: Path, group: Any) -> None:
    operators = torch.ops._c10d_functional
    with Capture(tmp_path / "t.jsonl"):
        result = operators.all_reduce(torch.ones(4), "sum", group.group_name)
        result = operators.wait_tensor(result)
    assert result.tolist() == [1.0] * 4
    expected = GroupSpec(group.group_name, "gloo", (0,), 0)
    assert groups_in(tmp_path / "t.jsonl")["_c10d_functional.all_reduce.default"] == expected


def test_functional_collective_of_an_unknown_group_keeps_its_name(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"), pytest.raises(RuntimeError):
        torch.ops._c10d_functional.all_reduce(torch.ones(4), "sum", "nobody")
    assert groups_in(tmp_path / "t.jsonl")["_c10d_functional.all_reduce.default"] == "nobody"


def test_thread_of_before_the_capture_is_named_if_it_calls_modules(tmp_path: Path) -> None:
    net, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    with ThreadPoolExecutor(1, "calls") as calls, ThreadPoolExecutor(1, "waits") as waits:
        waits.submit(int).result()
        calls.submit(net, x).result()
        with Capture(tmp_path / "t.jsonl"):
            calls.submit(net, x).result()
            net(x).sum().backward()
    end = load(tmp_path / "t.jsonl", partial=False).end
    assert end is not None
    assert [(item.op, item.reason, item.count) for item in end.dropped] == [("thread calls_0", UNSEEN_THREAD, 0)]


RPC = """
import sys, torch
from opgrip.capture import Capture

def work(x):
    return x.sin()

with Capture(sys.argv[1]):
    from torch.distributed import rpc
    transports = rpc.TensorPipeRpcBackendOptions(init_method="file://" + sys.argv[2], _transports=["uv"])
    rpc.init_rpc("one", rank=0, world_size=1, rpc_backend_options=transports)
    print(rpc.rpc_sync("one", work, args=(torch.ones(3),)), rpc.rpc_sync("one", torch.cos, args=(torch.ones(3),)))
    rpc.shutdown()
"""


def test_functions_run_by_rpc_are_recorded_and_other_calls_named(tmp_path: Path) -> None:
    (tmp_path / "rpc.py").write_text(RPC)
    run_python(tmp_path / "rpc.py", tmp_path / "t.jsonl", tmp_path / "store", cwd=tmp_path, status=0)
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert trace.calls["op"][trace.calls["thread"] == "rpc"].tolist() == ["aten.sin.default"]
    assert "aten.cos.default" not in set(trace.calls["op"])
    assert trace.end is not None
    assert [(item.op, item.count) for item in trace.end.dropped] == [UNSEEN_RPC[:1] + (0,)]
    assert ("dropped", ": ".join(UNSEEN_RPC)) in facts(trace)
