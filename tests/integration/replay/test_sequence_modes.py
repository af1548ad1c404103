"""Tests of step replay in a mode: calls that the mode cannot run are run in eager, and data flows."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from opgrip.capture import Capture
from opgrip.errors import UserError
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.modes import Mode, ModeOptions, Program, Task, modes
from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.replay_options import request_with
from opgrip.replay.results.results import OK, UNSUPPORTED, WRONG, Result
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.workload import workload_for
from opgrip.replay.sequences import step_passes
from opgrip.replay.sequences.call_timers import Slowdown, sequence_settings
from opgrip.replay.sequences.step_options import rows_of
from opgrip.replay.sequences.step_passes import Pass, paired_saving, run_timed
from opgrip.replay.sequences.step_replay import SequenceResult, replay_sequence
from opgrip.traces import load

SCALE = 3.0


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the operators that a test mode ran; it refuses cosines, and its sines are wrong."""
    names: list[str] = []

    def make(task: Task) -> Program:
        name = getattr(task.function, "__name__", str(task.function))
        if "cos" in name:
            raise Unsupported("no cosines here")

        def run(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            result = task.function(*args, **kwargs)
            return result + 1 if "sin" in name else result

        return Program(run, note="watched")

    get = modes.get
    # never repeat a pass because of contention
    monkeypatch.setattr(Slowdown, "is_slowed", False)
    monkeypatch.setattr(modes, "get", lambda name: Mode(make) if name == "watched" else get(name))
    return names


def replay_under(path: Path, mode: str, in_pairs: bool = False) -> tuple[SequenceResult, dict[str, Result]]:
    x = torch.full((50,), 0.5)
    with Capture(path):
        y = x.mul(SCALE)
        y.view(5, 10)[0].add_(1)
        y.cos().sin().sqrt_()
    trace = load(path)
    settings = workload_for(RunRequest(modes=ModeOptions(("eager", mode))), trace)
    result = replay_sequence(trace, replace(sequence_settings(settings), repeats=2, in_pairs=in_pairs))
    return result, {row.op: row for row in rows_of(result, make_cases(trace), settings)}


def test_calls_run_in_the_mode_or_else_in_eager(tmp_path: Path, runs: list[str]) -> None:
    result, rows = replay_under(tmp_path / "t.jsonl", "watched")
    assert (result.mode, result.replayed, result.in_eager) == ("watched", result.calls, 2)
    product = rows["aten.mul.Tensor"]
    assert (product.mode, product.note, product.status, product.samples) == ("watched", "watched", OK, 2)
    assert product.first_ms is not None
    assert product.max_abs == 0
    cosine, sine = rows["aten.cos.default"], rows["aten.sin.default"]
    assert (cosine.status, cosine.error, cosine.median_us) == (UNSUPPORTED, "no cosines here", None)
    assert (sine.status, sine.median_us) == (WRONG, None)
    assert sine.error is not None
    assert sine.max_abs == pytest.approx(1)
    # one run to prepare, and one in each of two passes; calls with wrong results are not run again
    counts = {name: sum(name in run for run in runs) for name in ("mul", "add_", "sqrt_", "sin")}
    assert counts == {"mul": 3, "add_": 3, "sqrt_": 3, "sin": 1}


def test_passes_in_pairs_alternate_with_eager(tmp_path: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[int] = []
    monkeypatch.setattr(step_passes, "run_timed", lambda *args: began.append(len(runs)) or run_timed(*args))
    result, _ = replay_under(tmp_path / "t.jsonl", "watched", in_pairs=True)
    counts = [after - before for before, after in itertools.pairwise([*began, len(runs)])]
    in_mode = result.calls - result.in_eager
    # in eager, in the mode, in the mode, in eager
    assert counts == [0, in_mode, in_mode, 0]
    assert result.repeats == 2
    assert result.saved is not None
    assert len(result.saved.shares) == in_mode
    assert 0 < sum(share for _, share in result.saved.shares) < 1


def test_jit_runs_a_whole_step(tmp_path: Path) -> None:
    result, rows = replay_under(tmp_path / "t.jsonl", "jit")
    assert (result.replayed, result.in_eager) == (result.calls, 0)
    assert {(row.status, row.mode, row.note) for row in rows.values()} == {(OK, "jit", "traced")}


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        ("reduce-overhead", "reduce-overhead replays CUDA graphs, whose results the next run of a call overwrites"),
        (("eager", "jit"), "--sequence runs under one mode"),
        ("ijt", "unknown mode 'ijt'"),
    ],
)
def test_modes_that_cannot_run_a_sequence_are_refused(tiny_trace: Path, mode: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        request_with(tiny_trace, sequence=True, mode=mode)


def test_saving_of_pairs_counts_disturbed_calls_little() -> None:
    usual = Pass([500, 300, 200], 1000, 0)
    disturbed = Pass([500, 90_000, 200], 90_700, 0)
    pairs = [replace(Pass([400, 300, 250], 950, 0), eager=disturbed if number == 3 else usual) for number in range(10)]
    saved = paired_saving(pairs, {0: 7})
    assert (saved.saving, saved.own_saving) == pytest.approx((0.05, 0.1))
    assert (saved.error, saved.own_error) == pytest.approx((0, 0))
    assert saved.shares == ((7, 0.5),)


def test_error_of_a_saving_grows_with_the_spread_of_pairs() -> None:
    eager = Pass([1000], 1000, 0)
    spreads = [
        [replace(Pass([900 + width * (number % 5)], 900, 0), eager=eager) for number in range(20)] for width in (1, 10)
    ]
    errors = [paired_saving(pairs, {}).error for pairs in spreads]
    assert 0 < errors[0] < errors[1] < 0.05
