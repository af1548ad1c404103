"""Scores relative to a baseline, their machine, and comparison of the distilled cases of two machines."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import HEADER, make_row
from programs import refusal, run_command, succeed

from opgrip.errors import UserError
from opgrip.replay.reports.comparison.unpaired_ratio import DRIFT, SHORT_US, USUAL
from opgrip.replay.reports.outcome import Results
from opgrip.replay.results.origins import Origin
from opgrip.replay.results.paired_ratio import WITHIN_95
from opgrip.replay.results.results import FAILED, SKIPPED, UNSUPPORTED, WRONG, Result
from opgrip.traces.zoo.manifest import FIELD
from opgrip.zoo.scoring.baselines import added, baseline_of, machine_of, read_baselines, times_of, write_baseline
from opgrip.zoo.scoring.score_table import LEAST_COVERED, plain_of, print_scores, score_line
from opgrip.zoo.scoring.score_values import CHARGE, Score
from opgrip.zoo.scoring.scores import distilled_scores, score_of

MODELS = (
    Origin("a.predict", "a", "predict", "lib", "x"),
    Origin("a.train", "a", "train", "lib", "x"),
    Origin("b.predict", "b", "predict", "lib", "x"),
    Origin("c.predict", "c", "predict", "lib", "y"),
)


def made_zoo(factors: dict[str, float] | float = 1.0, **cells: Any) -> Results:
    """Return three cases of each trace, of 10, 100 and 1000 us times the factor of the trace."""
    rows = []
    for origin in MODELS:
        factor = factors if isinstance(factors, float) else factors.get(origin.trace, 1.0)
        for number in range(3):
            times = [10.0 ** (number + 1) * factor * (1 + 0.001 * run) for run in (-1, 0, 1)]
            rows.append(origin.marked(make_row(number, times, **cells)))
    return Results(rows, HEADER)


def only(results: Results, baseline: Results) -> Score:
    (score,) = score_of(results, baseline_of(baseline))
    return score


def changed(results: Results, trace: str, number: int, **cells: Any) -> Results:
    rows: list[Result] = [
        replace(row, **cells) if (row.trace, row.case) == (trace, number) else row for row in results.rows
    ]
    return Results(rows, results.header)


def test_score_of_the_baseline_machine_is_one() -> None:
    score = only(made_zoo(), made_zoo())
    assert score.score == pytest.approx(1.0)
    assert score.supported == pytest.approx(1.0)
    assert not score.is_partial
    assert only(made_zoo(0.5), made_zoo()).score == pytest.approx(2.0)


def test_families_have_equal_weight_and_models_are_means_of_runs() -> None:
    score = only(made_zoo({"a.predict": 0.25, "a.train": 1.0}), made_zoo())
    by_name = {model.model: model for model in score.models}
    assert by_name["a"].score == pytest.approx(2.0)
    assert {name: model.weight for name, model in by_name.items()} == {"a": 0.25, "b": 0.25, "c": 0.5}
    assert score.score == pytest.approx(2.0**0.25)


@pytest.mark.parametrize("status", [WRONG, UNSUPPORTED, FAILED])
def test_case_that_is_not_ok_is_charged_and_the_score_is_partial(status: str) -> None:
    results = changed(made_zoo(), "c.predict", 2, status=status, median_us=None)
    score = only(results, made_zoo())
    model = next(model for model in score.models if model.model == "c")
    assert model.supported == pytest.approx(110 / 1110)
    assert model.speed == pytest.approx(1.0)
    assert model.score == pytest.approx(1110 / (110 + CHARGE * 1000))
    assert model.is_partial
    assert score.is_partial


@given(speed=st.floats(0.05, 20.0), number=st.integers(0, 2))
@settings(max_examples=20)
def test_fewer_supported_cases_never_improve_the_score(speed: float, number: int) -> None:
    whole = only(made_zoo(1 / speed), made_zoo())
    less = only(changed(made_zoo(1 / speed), "b.predict", number, status=UNSUPPORTED, median_us=None), made_zoo())
    assert whole.score is not None
    assert less.score is not None
    assert less.score < whole.score


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


@pytest.mark.parametrize("op", [ATTENTION, "aten.mkldnn_rnn_layer.default"])
def test_kernel_of_another_device_kind_is_left_out_of_the_score(op: str) -> None:
    base = changed(made_zoo(), "c.predict", 2, op=op)
    run = changed(made_zoo(0.5, device="cuda:0"), "c.predict", 2, op=op, status=UNSUPPORTED, median_us=None)
    score = only(run, base)
    assert (score.score, score.supported, score.is_partial) == (pytest.approx(2.0), pytest.approx(1.0), False)
    # 1000 of 1110 us of a model with half of the weight
    assert score.left_out == pytest.approx(500 / 1110)
    assert score.selected == pytest.approx(1.0)
    assert " without 45.0% of the baseline's time, of operators for other kinds of devices" in score_line(score)


@pytest.mark.parametrize(
    "cells",
    [
        {"op": "aten.mm.default"},
        {"op": "mmcv._ext:nms"},
        {"op": ATTENTION, "device": "cpu"},
        {"op": ATTENTION, "status": FAILED},
        {"op": "aten.cudnn_batch_norm.default"},
    ],
)
def test_other_cases_that_are_not_ok_count_in_the_base(cells: dict[str, str]) -> None:
    base = changed(made_zoo(), "c.predict", 2, op=cells["op"])
    cells = {"status": UNSUPPORTED, "device": "cuda:0", **cells}
    run = changed(made_zoo(0.5, device=cells["device"]), "c.predict", 2, median_us=None, **cells)
    score = only(run, base)
    assert score.left_out == 0
    assert score.is_partial
    assert "without" not in score_line(score)


@pytest.mark.parametrize("speed", [0.25, 4.0])
def test_model_without_ok_cases_is_charged_at_the_pace_of_the_others(speed: float) -> None:
    whole = made_zoo(1 / speed)
    rows = [replace(row, status=FAILED, median_us=None) if row.trace == "c.predict" else row for row in whole.rows]
    score = only(Results(rows, HEADER), made_zoo())
    model = next(model for model in score.models if model.model == "c")
    assert model.score == pytest.approx(min(1.0, speed) / CHARGE)
    assert model.speed is None
    assert score.speed == pytest.approx(speed)
    assert score.is_partial
    assert (score.score or 0.0) < speed


def test_partial_score_names_its_share_of_the_time() -> None:
    rows = [row for row in made_zoo().rows if row.case != 2]
    score = only(Results(rows, HEADER), made_zoo())
    assert score.selected == pytest.approx(110 / 1110)
    assert "over cases of 9.9% of the baseline's time" in score_line(score)
    assert "over cases" not in score_line(only(made_zoo(), made_zoo()))


def test_score_of_a_busy_machine_is_marked() -> None:
    quiet, busy = made_zoo(), made_zoo(slowed=0.9)
    for results, is_told in ((quiet, False), (busy, True)):
        text = io.StringIO()
        print_scores(score_of(results, baseline_of(quiet)), text)
        assert ("100% of the cases were slowed down by other processes" in text.getvalue()) == is_told


@pytest.mark.parametrize("us", [1.6e293, 1e308, 5e-324, -1e308, math.inf, math.nan])
@pytest.mark.parametrize("cell", ["median_us", "captured_us"])
def test_implausible_times_are_ignored(cell: str, us: float) -> None:
    rows = [replace(row, **{cell: us}) for row in made_zoo().rows]
    score_of(Results(rows, HEADER), baseline_of(made_zoo()))
    keys = list(dict.fromkeys(row.key for row in rows))
    field = {"keys": keys, "traces": {"a": {"cases": [0, 1, 2], "us": [9e14] * 3}}}
    (score,) = distilled_scores(Results([replace(row, trace=None) for row in rows], {**HEADER, FIELD: field}))
    assert score.score is None


def test_interval_covers_replays_of_one_machine_as_stated() -> None:
    """Draw pairs of runs with random differences of each case and of each run's speed."""
    generator = np.random.default_rng(0)

    def drawn() -> Results:
        pace = generator.normal()
        rows = []
        for origin in MODELS:
            for number in range(3):
                is_short = 10.0 ** (number + 1) < SHORT_US
                moved = generator.normal() * USUAL[is_short].variance ** 0.5 + pace * DRIFT[is_short]
                rows.append(origin.marked(make_row(number, [10.0 ** (number + 1) * math.exp(moved)] * 3)))
        return Results(rows, HEADER)

    inside = 0
    for _ in range(100):
        score = only(drawn(), drawn())
        assert score.score is not None
        inside += abs(math.log(score.score)) < WITHIN_95 * score.deviation
    assert 90 <= inside <= 99


def test_cases_that_the_baseline_cannot_run_do_not_count() -> None:
    baseline = changed(made_zoo(), "a.predict", 2, status=UNSUPPORTED, median_us=None)
    assert only(made_zoo(0.5), baseline).score == pytest.approx(2.0)


def test_trace_without_a_baseline_is_reported_and_not_scored() -> None:
    baseline = Results([row for row in made_zoo().rows if row.trace != "c.predict"], HEADER)
    score = only(made_zoo(0.5), baseline)
    assert [model.model for model in score.models if model.score is None] == ["c"]
    assert score.score == pytest.approx(2.0)
    assert not score.is_partial
    assert score.supported == pytest.approx(1.0)
    # a mode that is not installed does not count either
    rows = [row for row in made_zoo(0.5).rows if row.trace != "c.predict"]
    about = {"c.predict": {"model": "c", "problem": "it is not installed"}}
    score = only(Results(rows, {**HEADER, "traces": about}), baseline)
    assert score.supported == pytest.approx(1.0)


def test_options_without_a_column_are_in_the_name_of_a_score() -> None:
    results = Results(made_zoo(0.5).rows, {**HEADER, "unusual": ["bfloat16", "graph"]})
    assert only(results, made_zoo()).way == "eager, bfloat16, graph"
    with pytest.raises(UserError, match="without these options"):
        baseline_of(results)
    settings = {"settings": {"rtol": "0.5", "exec_mode": "graph", "seed": "1"}}
    assert (
        only(Results(made_zoo(0.5).rows, {**HEADER, **settings}), made_zoo()).way == "eager, rtol 0.5, exec_mode graph"
    )


def test_skipped_case_does_not_replace_an_equal_one() -> None:
    base = made_zoo()
    raised = replace(base.rows[0], status=SKIPPED, median_us=None)
    score = only(Results([raised, *made_zoo(0.5).rows], HEADER), base)
    assert score.score == pytest.approx(2.0)
    assert score.supported == pytest.approx(1.0)


def test_opreplay_prints_no_score_for_less_than_half_of_the_traces() -> None:
    def printed(*traces: str) -> list[str]:
        rows, text = [row for row in made_zoo() if row.trace in traces], io.StringIO()
        requested = {origin.trace: {} for origin in MODELS}
        scores = score_of(Results(rows, {**HEADER, "traces": requested}), baseline_of(made_zoo()))
        print_scores(scores, text, LEAST_COVERED)
        return text.getvalue().splitlines()

    assert printed("a.predict") == ["no score: these cases take 25.0% of the baseline's time, less than 50%"]
    lines = printed("a.predict", "b.predict")
    assert any(line.startswith("score under eager: 1.000") for line in lines)
    # models without a case have no line
    assert [line.split()[0] for line in lines if line.startswith(("a ", "b ", "c "))] == ["a", "b"]


def test_trace_that_was_not_replayed_has_its_own_line() -> None:
    rows = [row for row in made_zoo().rows if row.trace != "c.predict"]
    about = {"c.predict": {"model": "c", "library": "lib", "family": "y", "problem": "it is not installed"}}
    score = only(Results(rows, {**HEADER, "traces": about}), made_zoo())
    model = next(model for model in score.models if model.model == "c")
    assert model.score is None
    assert model.supported == 0
    assert score.is_partial


def test_baseline_of_another_recording_is_reported() -> None:
    def with_hash(text: str) -> Results:
        about = {origin.trace: {"model": origin.model, "trace_hash": text} for origin in MODELS}
        return Results(made_zoo().rows, {**HEADER, "traces": about})

    assert {trace.problem for model in only(with_hash("1"), with_hash("1")).models for trace in model.traces} == {""}
    score = only(with_hash("1"), with_hash("2"))
    problems = {trace.problem for model in score.models for trace in model.traces}
    assert problems == {"its baseline belongs to another recording"}
    assert score.score == pytest.approx(1.0)


def test_each_mode_has_a_score_against_eager_of_the_baseline() -> None:
    rows = [*made_zoo().rows, *made_zoo(0.5, mode="compile").rows]
    scores = score_of(Results(rows, HEADER), baseline_of(made_zoo()))
    assert [(score.way, round(score.score or 0, 6)) for score in scores] == [("eager", 1.0), ("compile", 2.0)]


@pytest.mark.parametrize("name", ["b.json", "b.json.gz", "b.json.zst"])
def test_baseline_survives_writing_and_reading(tmp_path: Path, name: str) -> None:
    baseline = baseline_of(made_zoo())
    write_baseline(baseline, tmp_path / name)
    again = read_baselines(tmp_path / name)
    assert again.traces.keys() == baseline.traces.keys()
    trace = again.traces["a.train"]
    assert trace.origin == MODELS[1]
    assert [case.median_us for case in trace.cases.values()] == [10.0, 100.0, 1000.0]
    assert "torch 2.13.0" in again.machine


def test_baseline_times_require_recorded_values_and_plausible_times() -> None:
    assert len(times_of(made_zoo())) == len(times_of(made_zoo(threads=3)))
    assert not times_of(made_zoo(values="random"))
    assert ("c.predict", made_zoo().rows[-1].key) not in times_of(changed(made_zoo(), "c.predict", 2, median_us=1e149))
    with pytest.raises(UserError, match="bfloat16"):
        times_of(Results(made_zoo().rows, {**HEADER, "unusual": ["bfloat16"]}))


def test_baseline_requires_one_number_of_threads() -> None:
    header = {**HEADER, "environment": {"processor": "P", "threads": 2}}
    assert "2 threads" in machine_of(Results(made_zoo().rows, header))
    of_three = machine_of(Results(made_zoo(threads=3).rows, header))
    assert "3 threads" in of_three
    assert "2 threads" not in of_three
    with pytest.raises(UserError, match="several run configurations: as in the program and 3 threads"):
        times_of(Results([*made_zoo().rows, *made_zoo(threads=3).rows], header))


def test_baseline_is_merged_only_with_one_of_the_same_machine() -> None:
    old, new = (
        baseline_of(made_zoo()),
        baseline_of(Results([row for row in made_zoo() if row.trace == "a.train"], HEADER)),
    )
    faster = replace(new, traces={name: replace(trace, cases={}) for name, trace in new.traces.items()})
    both = added(old, faster)
    assert both.traces == {**old.traces, "a.train": faster.traces["a.train"]}
    with pytest.raises(UserError, match="a baseline belongs to one machine"):
        added(replace(old, about={**old.about, "torch": "2.6.0"}), new)


BAD = (
    "",
    "[]",
    '{"format": 1}',
    '{"format": 1, "traces": {"a": {"cases": [["k", 1, NaN, 0]]}}}',
    '{"format": 1, "traces": {"a": {"cases": [["k", true, 1, 0]]}}}',
    '{"format": 1, "traces": {"a": {"cases": [["k", 1e400, 1, 0]]}}}',
    '{"format": 1, "traces": {"a": {"cases": [["k"]]}}}',
    '{"format": 1, "traces": {"a": {"cases": [["k", 1, 0, 0]]}}}',
    '{"format": 1, "traces": {"a": {"cases": [["k", 1, 5e-324, 0]]}}}',
    '{"format": 1, "traces": {"a": {"cases": [["k", -1, 1, 0]]}}}',
    '{"format": 1, "traces": {"a": {"cases": [["k", 1, 1, 9e14]]}}}',
    '{"format": 1, "traces": []}',
    '{"format": 99, "traces": {}}',
    "[" * 100_000,
)


@pytest.mark.parametrize("text", BAD)
def test_file_that_is_not_a_baseline_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"is not a baseline|was written by a newer opgrip"):
        read_baselines(path)


@pytest.mark.slow
def test_commands_make_a_baseline_and_print_the_score(tmp_path: Path) -> None:
    results, baseline = tmp_path / "zoo.json", tmp_path / "base.json.zst"
    made_zoo().save(results)
    done = succeed("opgrip", "zoo", "baseline", results, "-o", baseline, cwd=tmp_path)
    assert "12 cases of 4 traces" in done.stdout
    done = succeed("opgrip", "results", "score", results, "--baseline", baseline, cwd=tmp_path)
    assert "score under eager: 1.000 (95 %" in done.stdout
    done = run_command("opgrip", "results", "score", results, "--baseline", baseline, "--json", cwd=tmp_path)
    assert json.loads(done.stdout)[0]["models"][0]["model"] == "a"


def test_results_of_one_trace_have_no_score(tmp_path: Path) -> None:
    Results([make_row(0, [1.0])], HEADER).save(tmp_path / "one.json")
    error = refusal("opgrip", "results", "score", tmp_path / "one.json", cwd=tmp_path)
    assert "these results do not belong to the zoo" in error


NAMES = ("a.predict", "b.predict")

HERE = {"machine": "vm", "processor": "a slow processor", "threads": 2}


def zoo_of(row_device: str = "cpu", **about: Any) -> Results:
    rows: list[Result] = []
    for number, name in enumerate(NAMES):
        row = replace(make_row(number, [10.0]), device=row_device)
        rows.append(Origin(name, name[0], "predict").marked(row))
    return Results(rows, {**HEADER, "environment": HERE, "trace_hash": "abc", **about})


def distilled(times_us: tuple[float, float] = (10.0, 100.0), trace_hash: str = "abc", **cells: Any) -> Results:
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
