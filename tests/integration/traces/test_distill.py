"""Tests of the distilled set: few cases that represent many models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from made_runs import HEADER, make_row
from programs import SHIPPED_TRACES, refusal, run_command, succeed
from several_traces import small_trace

from opgrip.errors import UserError
from opgrip.replay import replay
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.cases.preceding_calls import CallPosition, make_preceding_calls
from opgrip.replay.outcome import Results
from opgrip.replay.results.origins import Origin
from opgrip.traces import Trace, load
from opgrip.traces.analysis.validation import validate
from opgrip.traces.io.reader import read_header
from opgrip.traces.io.shipped_traces import trace_file
from opgrip.traces.zoo.manifest import FIELD
from opgrip.zoo.corpus import read_corpus
from opgrip.zoo.corpus.distill import IN_PROGRAM, Points, check_of, choose, distill, named_by_files, write_cases
from opgrip.zoo.scoring.baselines import read_baselines
from opgrip.zoo.scoring.scores import distilled_scores, represented_times

SHIPPED = SHIPPED_TRACES[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distill")
    small_trace(folder / "net.predict.jsonl", (10, 20, 30, 1000))
    small_trace(folder / "net.train.jsonl", (10, 500, 700))
    small_trace(folder / "other.predict.jsonl", (7, 100_000))
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Results:
    return replay(folder / "other.predict.jsonl", iterations=2)


@pytest.fixture
def results(run: Results) -> Results:
    return Results(run.rows, dict(run.header))


def test_greedy_choice_equals_exhaustive_gains() -> None:
    generator = np.random.default_rng(0)
    points = Points(generator.normal(size=(40, 3)), generator.integers(0, 2, 40), category_distance=0.5)
    weights, groups = generator.random(40), np.arange(40) % 3
    squares = np.square(points.numbers[:, None] - points.numbers[None]).sum(axis=2)
    squares += 0.25 * (points.kinds[:, None] != points.kinds)
    likeness = np.exp(-np.sqrt(squares)) * (groups[:, None] == groups)
    best, expected = np.zeros(40), []
    for _ in range(12):
        gains = np.clip(likeness - best, 0, None) @ weights
        gains[expected] = -1.0
        expected.append(int(gains.argmax()))
        best = np.maximum(best, likeness[expected[-1]])
    assert choose(points, groups, weights, 12) == expected


def test_all_cases_are_chosen_if_fewer_than_requested_exist() -> None:
    points = Points(np.zeros((4, 1)), np.zeros(4, np.int64))
    assert sorted(choose(points, np.array([0, 0, 1, 1]), np.ones(4), 10)) == [0, 1, 2, 3]


def test_each_trace_is_represented_completely(folder: Path) -> None:
    corpus = read_corpus([str(folder)])
    distilled = distill(corpus, 3)
    assert len(distilled.keys) == 3
    whole = corpus.frame.groupby("trace")["time_us"].sum()
    for trace, weights in distilled.weights_us.items():
        assert sum(weights.values()) == pytest.approx(whole[trace])
        assert distilled.predicted_us(trace, distilled.times_us) == pytest.approx(whole[trace])


def test_uniform_slowdown_is_predicted_exactly(folder: Path) -> None:
    corpus = read_corpus([str(folder)])
    distilled = distill(corpus, 2)
    frame = corpus.frame
    times = {
        (trace, key): 2 * us for trace, key, us in zip(frame["trace"], frame["key"], frame["median_us"], strict=True)
    }
    checks = check_of(corpus, distilled, times)
    assert len(checks) == 3
    assert [item.error for item in checks] == pytest.approx([0.0] * 3)


def run_of(folder: Path, path: Path, factors: dict[str, float]) -> Path:
    corpus = named_by_files(read_corpus([str(folder)]))
    cases = zip(*(corpus.frame[name].tolist() for name in ("trace", "model", "key")), strict=True)
    rows = []
    for number, (trace, model, key) in enumerate(cases):
        us = 10.0 * (1 + int(key, 16) % 7) * factors[model]
        rows.append(Origin(trace, model).marked(make_row(number, [us], key=key)))
    Results(rows, HEADER).save(path)
    return path


def test_check_with_another_replay_names_the_mispredicted_model(folder: Path, tmp_path: Path) -> None:
    one = run_of(folder, tmp_path / "one.json", {"net": 1.0, "other": 1.0})
    two = run_of(folder, tmp_path / "two.json", {"net": 1.01, "other": 1.515})
    options = ("--cases", "1", "--times", one, "--check", two, "-o", "bench.jsonl")
    done = succeed("opgrip", "corpus", "distill", folder, *options, cwd=tmp_path)
    # with a single case, from one of the models, the other model's times are predicted to change like this case
    assert "the times of 1 of 2 models are predicted within 10%" in done.stdout
    errors = {line.split()[0]: line.split()[-1] for line in done.stdout.splitlines() if line.endswith("%")}
    assert (errors["net"], errors["other"]) in {("+0.0%", "-33.3%"), ("+50.0%", "+0.0%")}


def test_check_with_the_times_of_the_choice_is_refused(folder: Path, tmp_path: Path) -> None:
    one = run_of(folder, tmp_path / "one.json", {"net": 1.0, "other": 1.0})
    two = run_of(folder, tmp_path / "two.json", {"net": 1.0, "other": 1.5})
    copy = tmp_path / "copy.json"
    copy.write_bytes(one.read_bytes())
    for runs in ((one,), (copy,), (two, copy)):
        checks = [word for run in runs for word in ("--check", run)]
        options = ("--times", one, *checks, "-o", "bench.jsonl")
        error = refusal("opgrip", "corpus", "distill", folder, *options, cwd=tmp_path, in_one_line=True)
        assert "has the same times as --times" in error
        assert "replay the traces again" in error
        assert not (tmp_path / "bench.jsonl").exists()


def test_shipped_baseline_times_are_the_represented_times(tmp_path: Path) -> None:
    bench = tmp_path / "bench.jsonl"
    options = ("--cases", "5", "--times", "baseline", "-o", bench)
    succeed("opgrip", "corpus", "distill", "zoo:dcgan.predict", *options, cwd=tmp_path)
    (about,) = load(bench).header[FIELD]["traces"].values()
    assert sum(about["us"]) == pytest.approx(read_baselines().traces["dcgan.predict"].total_us, rel=0.02)
    checked = refusal("opgrip", "corpus", "distill", "zoo:dcgan.predict", *options, "-f", "--check", "baseline")
    assert "--check baseline has the same times as --times" in checked


def test_shipped_distilled_set_represents_all_baseline_traces() -> None:
    field = read_header(trace_file("trace:zoo_500")).fields[FIELD]
    assert len(field["keys"]) == 500
    baseline = read_baselines()
    for name, trace in baseline.traces.items():
        assert sum(field["traces"][name]["us"]) == pytest.approx(trace.total_us, rel=0.02), name


@pytest.mark.slow
def test_shipped_distilled_set_is_valid() -> None:
    validation = validate(trace_file("trace:zoo_500"))
    assert not validation.findings
    assert not validation.notes


def test_distilled_file_is_a_trace_whose_replay_has_a_score(folder: Path, tmp_path: Path) -> None:
    bench = tmp_path / "bench.jsonl"
    done = succeed("opgrip", "corpus", "distill", folder, "--cases", "4", "-o", bench, cwd=tmp_path)
    assert "4 cases represent 3 traces" in done.stdout
    assert "4 cases that represent 3 traces" in run_command("opgrip", "trace", "info", bench, cwd=tmp_path).stdout
    assert "--baseline is for several traces" in refusal("opreplay", bench, "--baseline", "other.json", cwd=tmp_path)
    assert run_command("opgrip", "trace", "validate", bench, cwd=tmp_path).returncode == 0
    trace = load(bench)
    assert {signature.number for signature in trace.signatures} > {0, 1, 2, 3}
    assert set(trace.header[FIELD]["traces"]) == {"net.predict", "net.train", "other.predict"}
    done = succeed("opreplay", bench, "--iterations", "3", "-o", "r.json", cwd=tmp_path)
    assert "score under eager" in done.stdout
    assert "4 cases: 4 ok" in done.stderr
    done = run_command("opgrip", "results", "score", "r.json", cwd=tmp_path)
    assert "score under eager" in done.stdout


def test_files_of_one_name_are_separate_traces(folder: Path, tmp_path: Path) -> None:
    for name, sizes in {"a": (10, 20), "b": (30, 40, 50)}.items():
        (tmp_path / name).mkdir()
        small_trace(tmp_path / name / "step.jsonl", sizes)
    corpus = named_by_files(read_corpus([str(tmp_path / "a"), str(tmp_path / "b")]))
    distilled = distill(corpus, 10)
    assert distilled.weights_us.keys() == {"step", "step~2"}
    of_rows = set(zip(corpus.frame["trace"], corpus.frame["model"], strict=True))
    assert of_rows == {(member.name, member.model) for member in corpus.members}
    write_cases(corpus, distilled.keys, tmp_path / "bench.jsonl", fields={FIELD: distilled.field(corpus)})
    assert sorted(case.key for case in make_cases(load(tmp_path / "bench.jsonl"))) == sorted(distilled.keys)


def test_chosen_case_keeps_the_calls_around_it(tmp_path: Path) -> None:
    whole = load(SHIPPED)
    corpus = read_corpus([str(SHIPPED)])
    distilled = distill(corpus, 20)
    fields = {FIELD: distilled.field(corpus)}
    write_cases(corpus, distilled.keys, tmp_path / "bench.jsonl", fields=fields, surrounding=IN_PROGRAM)
    part = load(tmp_path / "bench.jsonl")
    cases = make_cases(part)
    assert sorted(case.key for case in cases) == sorted(distilled.keys)
    times = dict(zip(corpus.frame["key"], corpus.frame["median_us"], strict=True))
    whole_of = {case.key: case for case in make_cases(whole)}
    around_part, around_whole = make_preceding_calls(part), make_preceding_calls(whole)
    for case in cases:
        same = whole_of[case.key]
        assert bool(case.input_sets) == bool(same.input_sets)
        assert case.captured_us == pytest.approx(times[case.key], rel=1e-3)
        assert (case.fresh or 0) == pytest.approx(same.fresh or 0, abs=0.4)
        places = described(part, around_part.places[case.number])
        assert 0 < len(places) <= IN_PROGRAM.places
        known = described(whole, around_whole.places[same.number])
        assert any(place in known for place in places), case.op


RECENT = 8 << 20


def described(trace: Trace, places: Sequence[CallPosition]) -> list[tuple[object, ...]]:
    ops = {signature.number: (signature.op, repr(signature.args)[:40]) for signature in trace.signatures}
    near = [
        tuple(number for number, distance in enumerate(place.distances) if (distance or RECENT) < RECENT)
        for place in places
    ]
    return [(tuple(ops[number] for number in place.before), own) for place, own in zip(places, near, strict=True)]


def test_invalid_distilled_field_is_refused_in_one_line(results: Results) -> None:
    keys = [row.key for row in results]
    for cases, us in (
        ([5], [1.0]),
        ([-1], [1.0]),
        ([0, 0], [1.0, 1.0]),
        ([0], [float("nan")]),
        ([0], [-1.0]),
    ):
        results.header[FIELD] = {"keys": keys, "traces": {"a": {"cases": cases, "us": us}}}
        with pytest.raises(UserError, match="does not say which original cases"):
            distilled_scores(results)
        # raised before any case runs
        with pytest.raises(UserError, match="does not say which original cases"):
            represented_times(results.header)
    about = {"a": {"cases": [0], "us": [1.0]}}
    for nonsense in (
        *({}, [], {"keys": 3, "traces": 4}, {"keys": keys, "traces": {"a": None}}),
        *({"keys": [["x"]], "traces": about}, {"keys": ["x", "x"], "traces": about}),
    ):
        results.header[FIELD] = nonsense
        with pytest.raises(UserError, match="does not say which original cases"):
            distilled_scores(results)


def test_case_that_represents_many_traces_is_one_measurement(results: Results) -> None:
    about = {"cases": [0], "us": [1.0]}
    keys = [row.key for row in results]
    results.header[FIELD] = {"keys": keys, "traces": {"a": about}}
    (one,) = distilled_scores(results)
    results.header[FIELD] = {"keys": keys, "traces": dict.fromkeys("abcdefghij", about)}
    (ten,) = distilled_scores(results)
    assert ten.deviation == pytest.approx(one.deviation)


def test_partly_replayed_distilled_set_is_reported(results: Results) -> None:
    keys = [row.key for row in results]
    results.header[FIELD] = {"keys": [*keys, "another"], "traces": {"a": {"cases": [0, 2], "us": [1.0, 3.0]}}}
    (score,) = distilled_scores(results)
    assert score.selected == pytest.approx(0.25)
    assert score.models[0].traces[0].problem == "some cases were not replayed"
