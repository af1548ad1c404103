"""The measurements of a first contact, in small, on the simulated accelerator."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from optional import needs
from programs import ROOT, run_python
from simulation import build, environment

SCRIPT = ROOT / "benchmarks/first_contact.py"
CALLS = 16


def measure(folder: Path, plan: str, only: str) -> list[dict[str, Any]]:
    """Run some steps of a plan from another folder than the repository's, and return the facts."""
    build()
    words = (plan, "--out", folder / "out", "--device", "sim", "--small", "--only", only)
    run_python(SCRIPT, *words, cwd=folder, env=environment(), fresh=True, timeout=200, status=0)
    return [json.loads(line) for line in (folder / "out/facts.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_device_and_its_clocks_are_measured(tmp_path: Path) -> None:
    facts = measure(tmp_path, "first", "facts,clocks")
    calls = [fact for fact in facts if "call" in fact]
    assert [fact for fact in facts if "error" in fact] == []
    assert len(calls) == CALLS
    assert all(call["events"]["us"] > 0 and call["discrete"]["us"] > 0 for call in calls)
    assert [fact["status"] for fact in facts if "status" in fact] == [0, 0]
    with zipfile.ZipFile(tmp_path / "out/raw.zip") as archive:
        assert {*archive.namelist()} == {"clocks-events.jsonl", "facts.txt", "clocks.txt"}


@pytest.mark.slow
@needs("transformers")
def test_model_is_observed_and_replayed(tmp_path: Path) -> None:
    facts = measure(tmp_path, "first", "program:bert,replay:bert")
    observers = [fact["observer"] for fact in facts if "observer" in fact]
    assert observers == ["native", "opgrip events", "empty mode", "native again", "profiler cpu", "eto"]
    [trace] = [fact for fact in facts if "trace" in fact]
    assert trace["calls"] > 500
    assert trace["untimed"] < trace["calls"] / 2
    [rows] = [fact for fact in facts if "statuses" in fact]
    assert rows["statuses"].keys() <= {"ok", "contended"}
    with zipfile.ZipFile(tmp_path / "out/raw.zip") as archive:
        assert {"bert.jsonl", "bert-events-by-op.json", "replay-bert.json"} <= {*archive.namelist()}


@pytest.mark.slow
@needs("transformers")
def test_replay_without_a_trace_is_skipped(tmp_path: Path) -> None:
    [fact] = measure(tmp_path, "second", "sequence:llama")
    assert fact["skipped"] == "there is no llama.jsonl: its capture failed or was not among the steps"


@pytest.mark.slow
@needs("transformers")
def test_costs_of_captured_steps_are_explained(tmp_path: Path) -> None:
    facts = measure(tmp_path, "third", "steps:llama")
    observers = [fact["observer"] for fact in facts if "observer" in fact]
    assert observers[:2] == ["native", "events"]
    assert observers[-2:] == ["empty mode", "native again"]
    assert [fact for fact in facts if "error" in fact] == []
    written_ms = [fact["writer_ms"] for fact in facts if "writer_ms" in fact]
    # the second capture holds the writing thread back
    assert written_ms[0] > written_ms[1]
    assert facts[-1]["status"] == 0
