"""Ranges that a replay reports to torch's profiler and NVTX."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from programs import refusal, succeed

from opgrip.replay import Results
from opgrip.replay.analyses.timeline import merged

FAST = ("--top", "4", "--iterations", "2", "--warmup", "0")


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    assert isinstance(events, list)
    return events


def test_timeline_has_a_range_for_each_run_with_its_operators(tiny_trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    # torch's profiler does not count range markers as operators; on a busy machine the marker is among the top
    done = succeed("opreplay", tiny_trace, *FAST, "--op", "aten.*", "--mode", "jit", "--profile", "-o", output)
    assert f"{tmp_path}/out.timeline.json.gz" in done.stderr
    events = read(tmp_path / "out.timeline.json.gz")
    rows = Results.load(output).frame
    rows = rows[rows["status"] == "ok"]
    assert set(rows["mode"]) == {"eager", "jit"}
    for row in rows.itertuples():
        runs = [event for event in events if event["name"] == f"case {row.case} {row.op} {row.mode}"]
        # runs invalidated by a slowed-down processor were repeated
        assert len(runs) >= 2, (row, done.stderr)
        for run in runs:
            inside = [
                event["name"]
                for event in events
                if event.get("cat") == "cpu_op" and run["ts"] <= event["ts"] <= run["ts"] + run["dur"]
            ]
            # TorchScript runs some operators as others: addmm as mm and add
            is_seen = bool(inside) if row.mode == "jit" else any(row.op.split(".")[1] in name for name in inside)
            assert is_seen, (row, run, inside, done.stderr)


def test_existing_timeline_is_replaced_only_with_force(tiny_trace: Path, tmp_path: Path) -> None:
    (tmp_path / "out.timeline.json.gz").write_text("mine")
    error = refusal("opreplay", tiny_trace, *FAST, "--profile", "-o", tmp_path / "out.json")
    assert "out.timeline.json.gz exists" in error
    assert (tmp_path / "out.timeline.json.gz").read_text() == "mine"


def test_merged_timelines_start_at_the_earliest_time() -> None:
    first = {"baseTimeNanoseconds": 5_000, "traceName": "/tmp/1.json", "traceEvents": [{"name": "a", "ts": 1.0}]}
    second = {"baseTimeNanoseconds": 8_000, "traceEvents": [{"name": "b", "ts": 1.5}, {"name": "c", "ph": "M"}]}
    whole = merged(iter([first, second]))
    assert whole["traceEvents"] == [{"name": "a", "ts": 1.0}, {"name": "b", "ts": 4.5}, {"name": "c", "ph": "M"}]
    assert "traceName" not in whole


@pytest.mark.slow
def test_sample_that_was_run_to_load_it_has_a_timeline(tmp_path: Path) -> None:
    succeed("opreplay", "sample:nms", *FAST, "--profile", "-o", tmp_path / "out.json")
    assert any(event["name"] == "case 0 nms eager" for event in read(tmp_path / "out.timeline.json.gz"))
