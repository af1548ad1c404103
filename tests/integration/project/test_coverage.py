"""Tests of the records that `benchmarks/coverage.py` keeps of trials that end early, and in a journal cut by a kill."""

from __future__ import annotations

import json
import multiprocessing
import os
from importlib import util
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from covering.table import is_native, is_whole, page

ROOT = Path(__file__).resolve().parents[3]
CAPTURED: dict[str, Any] = {"missing": {}, "surplus": {}, "dropped": 0, "is_same": True}


@pytest.fixture
def coverage() -> ModuleType:
    # load it by path, since pytest-cov's package has the same name
    path = ROOT / "benchmarks/coverage.py"
    spec = util.spec_from_file_location("coverage_of_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_crash_is_attributed_to_the_running_stage(coverage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(about: dict[str, Any], folder: str, answers: Connection) -> None:
        for part in ({"native": {}}, {"counted": {"is_repeatable": True}}, {"captured": CAPTURED}):
            answers.send(part)
        (Path(folder) / "said.txt").write_text("Segmentation fault\n")
        os._exit(3)

    monkeypatch.setattr(coverage, "PROCESSES", multiprocessing.get_context("fork"))
    monkeypatch.setattr(coverage, "run_in_process", crash)
    outcome = coverage.run_trial({}, 600)
    assert outcome["failed"] == "audited"
    assert outcome["reason"] == "the process ended with status 3: Segmentation fault"
    assert is_native(outcome)
    assert is_whole(outcome)


def test_coverage_page_equals_its_journal(coverage: ModuleType) -> None:
    outcomes = list(coverage.read_journal(coverage.JOURNAL).values())
    available = json.loads(coverage.AVAILABLE.read_text())
    assert (ROOT / "docs/coverage.md").read_text(encoding="utf-8") == page(outcomes, available)


def test_incomplete_last_journal_line_is_replaced(coverage: ModuleType, tmp_path: Path) -> None:
    journal = tmp_path / "outcomes.jsonl"
    outcomes = [{"library": "mmdet", "name": name, "run": "train"} for name in ("dino", "ssd")]
    coverage.append(journal, outcomes[0])
    with journal.open("a") as file:
        file.write(json.dumps(outcomes[1])[:20])
    assert coverage.read_journal(journal) == {"mmdet/dino train": outcomes[0]}
    coverage.append(journal, outcomes[1])
    assert list(coverage.read_journal(journal).values()) == outcomes
