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
from covering.trial import told

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


def test_model_is_tried_with_configs_and_settings_until_one_runs(
    coverage: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[str, str, int | None]] = []

    def run(about: dict[str, Any], timeout: int) -> dict[str, Any]:
        tried.append((about["model"], about["size"], about.get("batch_size")))
        if about["model"] == "configs/unbuilt.py":
            return {"failed": "native", "reason": "UserError: unbuilt.py cannot be built"}
        if about.get("batch_size") != 2:
            return {"failed": "native", "reason": "ValueError: Expected more than 1 value per channel"}
        return {"native": {}, "failed": "captured", "reason": "RuntimeError: of a capture"}

    monkeypatch.setattr(coverage, "run_trial", run)
    models = ("configs/unbuilt.py", "configs/built.py", "configs/other.py")
    outcome = coverage.attempt(coverage.Subject("mmseg", "fcn", models, "train"), 600)
    built = [
        ("configs/built.py", size, batch) for size, batch in (("160x160", None), ("320x320", None), ("320x320", 2))
    ]
    assert tried == [("configs/unbuilt.py", "160x160", None), *built]
    assert (outcome["model"], outcome["size"], outcome["batch_size"]) == ("built.py", "320x320", 2)
    assert outcome["failed"] == "captured"
    of_unbuilt = coverage.attempt(coverage.Subject("mmseg", "fcn", models[:1], "train"), 600)
    assert of_unbuilt["reason"].startswith("UserError")


def test_model_that_never_runs_reports_its_most_informative_failure(
    coverage: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(about: dict[str, Any], timeout: int) -> dict[str, Any]:
        if about["model"] == "configs/unbuilt.py":
            return {"failed": "native", "reason": "UserError: unbuilt.py cannot be built"}
        if about["model"] == "configs/other.py":
            return {"failed": "native", "reason": "RuntimeError: of the other"}
        if about["size"] == "160x160":
            return {"failed": "native", "reason": "RuntimeError: Kernel size can't be greater than actual input size"}
        return {"failed": "native", "reason": "AssertionError: two classes"}

    monkeypatch.setattr(coverage, "run_trial", run)
    models = ("configs/unbuilt.py", "configs/ssd300.py", "configs/other.py")
    outcome = coverage.attempt(coverage.Subject("mmdet", "ssd", models, "train"), 600)
    assert (outcome["model"], outcome["size"], "batch_size" in outcome) == ("ssd300.py", "", False)
    assert outcome["reason"] == "AssertionError: two classes"
    assert outcome["attempts"] == 9
    assert outcome["reasons"] == {
        "unbuilt.py 160x160": "UserError: unbuilt.py cannot be built",
        "ssd300.py 160x160": "RuntimeError: Kernel size can't be greater than actual input size",
        "ssd300.py 320x320": "AssertionError: two classes",
        "other.py 160x160": "RuntimeError: of the other",
    }


def test_time_limit_is_reported_only_without_another_reason(coverage: ModuleType) -> None:
    failures = [
        {"model": "detr.py", "size": "160x160", "reason": "ValueError: low >= high"},
        {"model": "detr.py", "size": "", "reason": "it takes more than 900 s"},
    ]
    assert coverage.most_telling(failures) == failures[0]
    assert coverage.most_telling(failures[1:]) == failures[1]


def test_coverage_page_equals_its_journal(coverage: ModuleType) -> None:
    outcomes = list(coverage.read_journal(coverage.JOURNAL).values())
    available = json.loads(coverage.AVAILABLE.read_text())
    assert (ROOT / "docs/coverage.md").read_text(encoding="utf-8") == page(outcomes, available)


def test_coverage_page_shows_totals_and_marks_first_attempts() -> None:
    failed = {"run": "train", "model": "ssd300.py", "size": "160x160", "failed": "native", "reason": "ValueError: low"}
    available = {name: {"version": "3.3.0", "models": 115} for name in ("mmdet", "transformers")}
    again = {"name": "ssd", "library": "mmdet", "attempts": 4, **failed}
    text = page([again, {"name": "Bert", "library": "transformers", **failed}], available)
    assert "| mmdet | train | 1 of 115 | 0 |" in text
    assert "first attempt" not in text
    text = page([again, {"name": "dino", "library": "mmdet", **failed}], available)
    assert "| native, first attempt: ValueError: low |" in text
    assert "*first attempt*" in text


def test_timeout_is_attributed_to_the_running_stage(coverage: ModuleType) -> None:
    answers, questions = multiprocessing.Pipe(duplex=False)
    with answers, questions:
        questions.send({"native": {}})
        outcome, reason = coverage.receive(answers, 0)
    assert (outcome, reason) == ({"native": {}}, "it takes more than 0 s")
    assert coverage.running_stage(outcome) == "counted"


def test_incomplete_last_journal_line_is_replaced(coverage: ModuleType, tmp_path: Path) -> None:
    journal = tmp_path / "outcomes.jsonl"
    outcomes = [{"library": "mmdet", "name": name, "run": "train"} for name in ("dino", "ssd")]
    coverage.append(journal, outcomes[0])
    with journal.open("a") as file:
        file.write(json.dumps(outcomes[1])[:20])
    assert coverage.read_journal(journal) == {"mmdet/dino train": outcomes[0]}
    coverage.append(journal, outcomes[1])
    assert list(coverage.read_journal(journal).values()) == outcomes


def test_reported_errors_contain_no_folders_of_the_machine() -> None:
    text = "/root/lib/site-packages/mmdet/a.py is no config:\nImportError, the current sys.path is: /root /tmp"
    assert told(text) == "mmdet/a.py is no config: ImportError"
