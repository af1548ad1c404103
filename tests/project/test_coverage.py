"""What `benchmarks/coverage.py` keeps of models: of trials that end early, and in a journal that a kill cut."""

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
from covering.table import is_native, is_whole

CAPTURED: dict[str, Any] = {"missing": {}, "surplus": {}, "dropped": 0, "is_same": True}


@pytest.fixture
def coverage() -> ModuleType:
    # by its file: pytest-cov's package has the same name
    path = Path(__file__).resolve().parents[2] / "benchmarks/coverage.py"
    spec = util.spec_from_file_location("coverage_of_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_crash_is_of_the_stage_that_ran_and_what_came_before_stays(
    coverage: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_model_is_tried_with_the_next_config_and_setting_until_one_runs_natively(
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


def test_a_trial_that_takes_too_long_is_of_the_stage_that_ran(coverage: ModuleType) -> None:
    answers, questions = multiprocessing.Pipe(duplex=False)
    with answers, questions:
        questions.send({"native": {}})
        outcome, reason = coverage.receive(answers, 0)
    assert (outcome, reason) == ({"native": {}}, "it takes more than 0 s")
    assert coverage.running_stage(outcome) == "counted"


def test_half_a_last_line_of_the_journal_gives_way_to_the_next(coverage: ModuleType, tmp_path: Path) -> None:
    journal = tmp_path / "outcomes.jsonl"
    outcomes = [{"library": "mmdet", "name": name, "run": "train"} for name in ("dino", "ssd")]
    coverage.append(journal, outcomes[0])
    with journal.open("a") as file:
        file.write(json.dumps(outcomes[1])[:20])
    assert coverage.read_journal(journal) == {"mmdet/dino train": outcomes[0]}
    coverage.append(journal, outcomes[1])
    assert list(coverage.read_journal(journal).values()) == outcomes
