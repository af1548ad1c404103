"""Machine of a score, and comparison of the distilled cases of two machines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import HEADER, make_row
from programs import refusal, run_command, succeed

from opgrip.errors import UserError
from opgrip.replay.outcome import Results
from opgrip.replay.results.origins import Origin
from opgrip.replay.results.results import FAILED, Result
from opgrip.traces.zoo.manifest import FIELD
from opgrip.zoo.scoring.baselines import baseline_of
from opgrip.zoo.scoring.score_table import plain_of, score_line
from opgrip.zoo.scoring.scores import distilled_scores, score_of

NAMES = ("a.predict", "b.predict")
HERE = {"machine": "vm", "processor": "a slow processor", "threads": 2}


def zoo_of(row_device: str = "cpu", **about: Any) -> Results:
    """Return results with a case of each of two traces, on a device."""
    rows: list[Result] = []
    for number, name in enumerate(NAMES):
        row = replace(make_row(number, [10.0]), device=row_device)
        rows.append(Origin(name, name[0], "predict").marked(row))
    return Results(rows, {**HEADER, "environment": HERE, "trace_hash": "abc", **about})


def distilled(times_us: tuple[float, float] = (10.0, 100.0), trace_hash: str = "abc", **cells: Any) -> Results:
    """Return a replay of two cases: one trace contains the first, the other both."""
    rows = [make_row(number, [us], **cells) for number, us in enumerate(times_us)]
    keys = [row.key for row in rows]
    traces = {"a.predict": {"model": "a", "cases": [0], "us": [5.0]}}
    traces["b.predict"] = {"model": "b", "cases": [0, 1], "us": [1.0, 3.0]}
    return Results(rows, {**HEADER, "trace_hash": trace_hash, FIELD: {"keys": keys, "traces": traces}})


def test_score_names_its_machine_and_that_of_the_baseline() -> None:
    (score,) = score_of(zoo_of(), baseline_of(Results(zoo_of().rows, HEADER)))
    machines = "on a slow processor, cpu, torch 2.13.0, 2 threads, against a processor, cpu, torch 2.13.0"
    assert score_line(score).endswith(machines)
    plain = plain_of(score)
    about = {name: plain[name] for name in ("way", "machine", "device", "torch", "trace", "trace_hash")}
    assert about == {
        "way": "eager",
        "machine": "a slow processor, cpu, torch 2.13.0, 2 threads",
        "device": "cpu",
        "torch": "2.13.0",
        "trace": "net.jsonl",
        "trace_hash": "abc",
    }


def test_score_of_an_accelerator_names_the_device() -> None:
    on_gpu = zoo_of("cuda:0", device="NVIDIA H100")
    (score,) = score_of(on_gpu, baseline_of(zoo_of()))
    assert score.way == "eager, cuda:0"
    assert "on a slow processor, NVIDIA H100, torch 2.13.0" in score_line(score)
    on_both = Results([*zoo_of().rows, *on_gpu.rows], on_gpu.header)
    assert [score.way for score in score_of(on_both, baseline_of(zoo_of()))] == ["eager", "eager, cuda:0"]


def test_distilled_score_names_its_machine_and_trace() -> None:
    (score,) = distilled_scores(distilled())
    assert " on a processor, cpu, torch 2.13.0, against the captured times of its cases" in score_line(score)
    assert plain_of(score)["trace_hash"] == "abc"


def test_score_line_shows_threads_once() -> None:
    rows = [replace(row, threads=3) for row in zoo_of().rows]
    (score,) = score_of(Results(rows, zoo_of().header), baseline_of(zoo_of()))
    assert score.way == "eager, 3 threads"
    assert "2 threads" not in score.measured.machine


def test_untrusted_device_name_does_not_reach_the_terminal() -> None:
    (score,) = score_of(zoo_of(device="\x1b[31mred"), baseline_of(zoo_of()))
    assert "\x1b" not in score_line(score)


def test_missing_score_names_the_machine() -> None:
    rows = [replace(row, status=FAILED, median_us=None) for row in zoo_of().rows]
    (score,) = score_of(Results(rows, zoo_of().header), baseline_of(zoo_of()))
    assert score_line(score).startswith("no score under eager on a slow processor, cpu")


def test_two_replays_of_a_distilled_trace_are_compared() -> None:
    (score,) = distilled_scores(distilled((5.0, 50.0)), distilled((10.0, 100.0)))
    assert score.score == pytest.approx(2.0)
    assert score.baseline == "a processor, cpu, torch 2.13.0"
    # weighted by the time that each case represents on the other machine: 1 us there takes 10 us, 3 us take 300 us
    (score,) = distilled_scores(distilled((10.0, 50.0)), distilled((10.0, 100.0)))
    by_name = {model.model: model.score for model in score.models}
    assert by_name == {"a": pytest.approx(1.0), "b": pytest.approx(310 / 160)}


def test_cases_that_the_other_replay_could_not_run_do_not_count() -> None:
    base = distilled((10.0, 100.0))
    base = Results([base.rows[0], replace(base.rows[1], status=FAILED, median_us=None)], base.header)
    (score,) = distilled_scores(distilled((5.0, 500.0)), base)
    assert score.score == pytest.approx(2.0)
    assert not score.is_partial


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (distilled(trace_hash="other"), "not a replay of the same distilled trace"),
        (
            Results(distilled().rows, {**distilled().header, "unusual": ["bfloat16"]}),
            "the baseline was made with bfloat16",
        ),
    ],
)
def test_replay_of_another_trace_is_refused_as_baseline(base: Results, message: str) -> None:
    with pytest.raises(UserError, match=message):
        distilled_scores(distilled(), base)


def test_score_command_accepts_another_distilled_run_as_baseline(tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    distilled((5.0, 50.0)).save(one)
    distilled().save(other)
    words = ("results", "score", one)
    assert "score under eager: " in run_command("opgrip", *words, cwd=tmp_path).stdout
    done = succeed("opgrip", *words, "--baseline", other, cwd=tmp_path)
    assert "score under eager: 2.000 (95 %" in done.stdout
    done = run_command("opgrip", *words, "--baseline", other, "--json", cwd=tmp_path)
    assert json.loads(done.stdout)[0]["machine"] == "a processor, cpu, torch 2.13.0"
    distilled(trace_hash="another").save(other, force=True)
    error = refusal("opgrip", *words, "--baseline", other, cwd=tmp_path)
    assert (
        "the baseline is not a replay of the same distilled trace: replay this file on the baseline's machine" in error
    )
