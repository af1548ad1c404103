"""The measurements of a first contact, in small, on the simulated accelerator."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from optional import needs
from programs import ROOT, run_python
from simulation import build, environment

SCRIPT = ROOT / "benchmarks/first_contact.py"
CALLS = 16


# code that an interpreter runs at its start so that it cannot import opgrip
NOT_INSTALLED = """
import sys

sys.path[:] = [path for path in sys.path if path not in ({root!r}, {root!r} + "/src")]
"""


def measure(folder: Path, plan: str, only: str = "") -> list[dict[str, Any]]:
    """Run a plan, or some of its steps, without an index in an empty folder where opgrip is not installed; return the
    facts.
    """
    build()
    words = (plan, "--out", folder / "out", "--device", "sim", "--small", "--seconds", 1200)
    variables = environment(PIP_INDEX_URL="http://127.0.0.1:9/", PIP_NO_INDEX="1")
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(NOT_INSTALLED.format(root=str(ROOT)))
    variables["PYTHONPATH"] = os.pathsep.join([str(site), variables["PYTHONPATH"]])
    run_python("-c", "import opgrip", cwd=folder, env=variables, fresh=True, status=1)
    some = ("--only", only) if only else ()
    run_python(SCRIPT, *words, *some, cwd=folder, env=variables, fresh=True, timeout=1250, status=0)
    return [json.loads(line) for line in (folder / "out/facts.jsonl").read_text().splitlines()]


def ends_of(facts: list[dict[str, Any]]) -> dict[str, str]:
    """Return how each step ended: `ok`, its error, or why it was skipped."""
    ends = [fact for fact in facts if "status" in fact or "skipped" in fact]
    return {fact["stage"]: fact.get("error") or fact.get("skipped") or "ok" for fact in ends}


@pytest.mark.slow
@pytest.mark.timeout(1300)
@needs("transformers")
def test_first_plan_measures_a_model(tmp_path: Path) -> None:
    facts = measure(tmp_path, "first", "facts,clocks,bert")
    assert [fact for fact in facts if "error" in fact and "observer" in fact] == []
    assert {name for name, end in ends_of(facts).items() if end != "ok"} == set()
    calls = [fact for fact in facts if "call" in fact]
    assert len(calls) == CALLS
    assert all(call["events"]["us"] > 0 and call["discrete"]["us"] > 0 for call in calls)
    observers = [fact["observer"] for fact in facts if "observer" in fact and fact["stage"] == "program:bert"]
    assert observers == ["native", "opgrip events", "empty mode", "native again", "profiler cpu", "eto"]
    [trace] = [fact for fact in facts if "trace" in fact and fact["stage"] == "program:bert"]
    assert trace["calls"] > 500
    assert trace["untimed"] < trace["calls"] / 2
    for rows in [fact for fact in facts if "statuses" in fact]:
        assert rows["statuses"].keys() <= {"ok", "contended"}
    [graphs] = [fact for fact in facts if "graphs" in fact and fact["stage"] == "step-graphs:bert"]
    assert graphs["graphs"] > 0
    with zipfile.ZipFile(tmp_path / "out/raw.zip") as archive:
        kept = {"bert.jsonl", "bert-events-by-op.json", "replay-bert.json", "clocks-events.jsonl", "facts.txt"}
        assert kept <= {*archive.namelist()}


@pytest.mark.slow
@pytest.mark.timeout(1300)
@needs("transformers")
def test_second_plan_measures_a_model_and_failures(tmp_path: Path) -> None:
    facts = measure(tmp_path, "second", "llama,failures,roofline,collective")
    on_cuda = {"ncu:llama", "collective"}
    assert {name for name, end in ends_of(facts).items() if end != "ok"} == on_cuda
