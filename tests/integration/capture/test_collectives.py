"""Tests of recorded collectives: they contain what recreates them, such as a group's members besides its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from opgrip.capture import Capture
from opgrip.capture.torch_compat.torch_private import private_places
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
