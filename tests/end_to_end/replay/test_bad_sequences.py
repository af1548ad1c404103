"""Step replays with calls that crash, hang, exit or use too much memory: only these calls are lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_cases import ABORT, EXIT, EXTENSIONS, HANG, HUGE, SEGFAULT, bad_trace
from example_trace import write
from programs import run_command

from opgrip.replay.results.results import CONTENDED, FAILED, OK, TIMEOUT
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import OPERATOR, Calls, End, Scope, Signature

FAST = ["--sequence", "--iterations", "1"]


def run_bad(trace: Path, output: Path, *options: str, status: int = 0) -> tuple[dict[str, str], dict[str, str]]:
    """Return, by operator, the reasons why calls did not run on flowing values, and the status of their rows."""
    done = run_command("opreplay", trace, *FAST, *options, "-o", output)
    assert done.returncode == status, done.stderr
    result: dict[str, Any] = json.loads(output.read_text())
    reasons = {row["op"]: f"{row['status']}: {row['reason']}" for row in result["sequence"]["not_replayed"]}
    for row in result["results"]:
        assert row["error"] is None or row["error"] in reasons[row["op"]]
    return reasons, {row["op"]: row["status"] for row in result["results"]}


@pytest.mark.slow
def test_bad_call_is_reported_and_not_run_again(tmp_path: Path) -> None:
    trusted = [word for name in EXTENSIONS for word in ("--extension", name)]
    reasons, statuses = run_bad(bad_trace(tmp_path / "t.jsonl"), tmp_path / "r.json", *trusted, "--timeout", "2")
    assert set(reasons) == {SEGFAULT, ABORT, EXIT, HANG, HUGE}
    assert "it ended its process: segmentation fault" in reasons[SEGFAULT]
    assert "it ended its process: aborted" in reasons[ABORT]
    assert "it ended its process with status 3" in reasons[EXIT]
    assert "it took longer than 2 s" in reasons[HANG]
    assert "unsupported: " in reasons[HUGE]
    assert statuses == {
        **dict.fromkeys([SEGFAULT, ABORT, EXIT, HUGE], FAILED),
        HANG: TIMEOUT,
        "aten.mul.Tensor": OK if statuses["aten.mul.Tensor"] == OK else CONTENDED,
    }


def test_call_with_larger_outputs_than_recorded_hits_the_memory_limit(tmp_path: Path) -> None:
    recorded = TensorSpec((2, 3), (3, 1), torch.float32, "cpu")
    signature = Signature(0, OPERATOR, "aten.ones.default", ([30_000, 30_000],), {}, outputs=recorded)
    records = [Scope(0, "", "", "forward"), signature, Calls(0, [0], [0], [10], [5]), End(1, 1, 10)]
    reasons, statuses = run_bad(
        write(tmp_path / "t.jsonl", records), tmp_path / "r.json", "--memory-limit", "1GB", status=1
    )
    assert reasons["aten.ones.default"] == "unsupported: out of memory: 3.6 GB were requested"
    assert statuses == {"aten.ones.default": FAILED}
