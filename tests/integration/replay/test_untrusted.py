"""Untrusted candidates: cheats get no better verdict than their honest twins, and each defence is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cheats
import pytest
import torch
from programs import run_command

from opgrip import Capture, UserError, judge
from opgrip.replay.inputs.inputs import Inputs
from opgrip.replay.replay_options import request_with
from opgrip.replay.results.judgement import CandidateColumns, judge_rows
from opgrip.replay.results.results import OK, Result
from opgrip.replay.run import untrusted, untrusted_subject
from opgrip.replay.run.measure import measure_cases
from opgrip.replay.run.untrusted_subject import UntrustedSubject
from opgrip.replay.run.workload import load_workload

SOFTMAX = "aten._softmax.default"
RUNS = 16


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("untrusted") / "step.jsonl"
    with Capture(path):
        torch.softmax(torch.randn(32, 64), -1)
    yield path
    end_processes()


@pytest.fixture(scope="module")
def constant_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("untrusted") / "constant.jsonl"
    with Capture(path):
        torch.softmax(torch.full((32, 64), 0.5), -1)
    return path


def end_processes() -> None:
    for process in untrusted._processes.values():
        process.close()
    untrusted._processes.clear()


def row_of(trace: Path, name: str) -> Result:
    """Return the judged row of a candidate of `cheats`, judged in processes of this one."""
    text = f"{SOFTMAX}={cheats.__file__}:{name}"
    options = {"candidate": [text], "untrusted": True, "iterations": RUNS, "cache": "warm", "threads": 1}
    workload = load_workload(request_with(str(trace), **options))
    (rows,) = measure_cases(workload.cases, workload)
    if (process := untrusted._processes.pop(workload.candidates.candidate[0], None)) is not None:
        # the next judgement must not find what this one left
        process.close()
    return judge_rows(rows, "eager", None, "", {})[-1]


def verdict_on(trace: Path, name: str) -> tuple[str | None, str]:
    row = row_of(trace, name)
    return CandidateColumns.of(row).verdict, str(row.error)


CHEATS = {
    "cached_by_identity": "elements differ",
    "cached_by_address": None,
    "cached_by_version": "elements differ",
    "cached_by_value": "",
    "lazy": "output is a Lazy, not a plain tensor",
    "left_on_a_thread": None,
    "left_on_a_python_thread": None,
    "left_on_a_daemon": "leaves the thread",
    "with_patched_clock": "replaces time.perf_counter_ns",
    "with_clock_of_the_process": "",
    "with_patched_elapsed_time": "replaces torch.cuda.Event.elapsed_time",
    "with_patched_synchronize": "replaces torch.cuda.synchronize",
    "many_calls_at_once": "differ",
    "from_the_reference": "differ",
    "only_first_calls": "in a timed run: output 0",
    "only_first_values": "in a timed run: output 0",
    "less_precise": "elements differ",
    "forged_answer": "its process did not send one JSON object or list",
}
"""cheats, with a part of the reason why they are wrong; empty if they are right and as slow as their twin, None if
chance decides which of the two"""
QUICK = {"lazy", "with_clock_of_the_process", "only_first_values"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CHEATS]
)
def test_cheat_gets_no_better_verdict_than_its_honest_twin(trace: Path, name: str) -> None:
    verdict, reason = verdict_on(trace, name)
    allowed = {"wrong", "slower"} if CHEATS[name] is None else {"wrong" if CHEATS[name] else "slower"}
    assert verdict in allowed, reason
    assert (CHEATS[name] or "") in reason


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["honest", pytest.param("honest_with_a_thread", marks=pytest.mark.slow)])
def test_honest_twin_is_right(trace: Path, name: str) -> None:
    assert verdict_on(trace, name) == ("slower", "None")


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_shortcut_on_constant_inputs_does_not_help(constant_trace: Path) -> None:
    assert verdict_on(constant_trace, "constant") == ("slower", "None")


def same_values(subject: UntrustedSubject, index: int) -> Inputs:
    return subject._drawn.setdefault(index, [subject.draw(index, 0)])[0]


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "without", "cheat"),
    [
        (UntrustedSubject, "_next_inputs", same_values, "only_first_values"),
        (UntrustedSubject, "_next_inputs", same_values, "cached_by_version"),
        (UntrustedSubject, "_compare", lambda self, inputs, run: None, "only_first_calls"),
        (untrusted_subject, "MARGIN", 1e9, "with_clock_of_the_process"),
    ],
)
def test_cheat_works_without_the_defence_against_it(
    trace: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, without: Any, cheat: str
) -> None:
    monkeypatch.setattr(owner, name, without)
    row = row_of(trace, cheat)
    assert row.status == OK, row.error
    assert row.median_us is not None
    assert row.median_us < cheats.SLOW_S * 1e6 / 2


def test_functions_of_this_process_cannot_be_untrusted(trace: Path) -> None:
    with pytest.raises(UserError, match="name them as text"):
        judge({SOFTMAX: torch.softmax}, trace, untrusted=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--untrusted"], "--untrusted is for candidates: add --candidate"),
        (["--untrusted", "--confirm", "--candidate", f"{SOFTMAX}={cheats.__file__}:honest"], "without protection"),
        (["--untrusted", "--backward", "--candidate", f"{SOFTMAX}={cheats.__file__}:honest"], "does not support"),
    ],
)
def test_options_that_contradict_untrusted_are_refused(trace: Path, words: list[str], message: str) -> None:
    done = run_command("opreplay", trace, *words)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.timeout(300)
def test_command_judges_an_untrusted_candidate(trace: Path) -> None:
    words = ["--candidate", f"{SOFTMAX}={cheats.__file__}:less_precise", "--untrusted", "--iterations", "2"]
    done = run_command("opreplay", trace, *words)
    assert done.returncode == 1, done.stderr
    assert "wrong on 1 of 1 signature" in done.stdout
    assert ("bubblewrap" in done.stderr) == (untrusted.unconfined() is not None)
