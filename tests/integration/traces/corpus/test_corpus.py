"""The zoo and corpora of traces: their files and tables, how traces are made, and distilled sets."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from example_trace import small_trace, write
from made_runs import HEADER, make_row
from optional import needs, optional
from pages import in_browser, opened
from programs import ROOT, SHIPPED_TRACES, refusal, run_command, succeed, train_tiny_net
from project_files import pyproject

from opgrip.capture import Capture
from opgrip.capture.command.capture_options import make_parser
from opgrip.errors import MissingFileError, UserError
from opgrip.replay import replay
from opgrip.replay.cases.cases import contexts_of, make_cases
from opgrip.replay.cases.preceding_calls import CallPosition, make_preceding_calls
from opgrip.replay.reports.outcome import Results
from opgrip.replay.results.origins import Origin
from opgrip.tools.opgrip import main
from opgrip.traces import Trace, load
from opgrip.traces.analysis.differences import compare_traces
from opgrip.traces.codec.record_forms import key_of_case
from opgrip.traces.io.reader import read_header
from opgrip.traces.io.shipped_traces import trace_file
from opgrip.traces.schema.arguments import TensorSpec, map_leaves
from opgrip.traces.zoo import ZooTrace, read_manifest, select, zoo_file
from opgrip.traces.zoo.manifest import FIELD, MODELS, SUFFIX
from opgrip.zoo import making as zoo
from opgrip.zoo.corpus import Corpus, read_corpus, summarize
from opgrip.zoo.corpus.corpus import MOST_ELEMENTS, rows_of, signature_facts, weighted
from opgrip.zoo.corpus.distill import IN_PROGRAM, Points, check_of, choose, distill, named_by_files, write_cases
from opgrip.zoo.corpus.summaries import cover, public_operators, summarize_coverage, write_summary, write_table
from opgrip.zoo.making import command_of, count_distinct, pack, record_of, write_manifest
from opgrip.zoo.scoring.baselines import read_baselines
from opgrip.zoo.scoring.scores import distilled_scores, represented_times

DLOP = {"input": [[2, 3], [4, 3]], "min": [[0], [0]], "max": [[6], [6]]}


def small() -> None:
    x = torch.randn(8, 8)
    x.relu()
    x.relu()
    x.sin()


def other() -> None:
    x = torch.randn(8, 8)
    x.relu()
    x[:4].cos()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x @ x


def captured(path: Path, run: Callable[[], object]) -> Path:
    with Capture(path):
        run()
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    captured(folder / "small.jsonl", small)
    captured(folder / "other.jsonl.gz", other)
    train_tiny_net(folder / "tiny.jsonl")
    (folder / "below").mkdir()
    (folder / "below" / "clamp.json").write_text(json.dumps(DLOP))
    (folder / "notes.txt").write_text("no trace\n")
    return folder


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    return read_corpus([str(folder)])


def test_folder_contains_traces_and_files_of_other_tools(corpus: Corpus, folder: Path) -> None:
    assert sorted(member.name for member in corpus.members) == [
        *("clamp.json", "other.jsonl.gz", "small.jsonl", "tiny.jsonl")
    ]
    assert corpus.sources == ["trace", "dlop"]
    assert list(corpus.notes) == [f"{folder / 'notes.txt'} is not a trace"]


def test_each_model_of_a_source_has_equal_weight(corpus: Corpus) -> None:
    frame = corpus.frame
    models = (frame["share"] * frame["weight"]).groupby([frame["source"], frame["model"]]).sum()
    assert models["trace"].tolist() == pytest.approx([1 / 3] * 3)
    assert models["dlop"].tolist() == pytest.approx([1])


def test_traces_of_a_model_share_its_weight() -> None:
    rows = [
        *(("a.predict", "trace", "a", 5.0, 1), ("a.train", "trace", "a", 9.0, 4), ("b", "trace", "b", 1.0, 1)),
        *(("one.json", "dlop", "dlop", 0.0, 3), ("two.json", "dlop", "dlop", 0.0, 1)),
    ]
    frame = weighted(pd.DataFrame(rows, columns=["trace", "source", "model", "time_us", "count"]))
    assert frame["weight"].tolist() == pytest.approx([0.25, 0.25, 0.5, 0.75, 0.25])


def test_operators_have_the_number_of_models_that_call_them(corpus: Corpus) -> None:
    summary = summarize(corpus)
    table = summary.table.set_index(["source", "op"])
    relu = table.loc["trace", "aten.relu.default"]
    assert (relu["models"], relu["traces"], relu["calls"], relu["signatures"]) == (2, 2, 3, 1)
    assert table.loc["trace", "aten.sin.default"]["models"] == 1
    assert table.loc["trace"]["share"].sum() == pytest.approx(1)
    assert table.loc["dlop"]["share"].sum() == pytest.approx(1)
    assert relu["usual_shapes"] == "[8,8] 100%"
    assert (relu["elements_p10"], relu["elements_p90"]) == (64, 64)
    alone = set(summary.unique("trace")["op"])
    assert {"aten.sin.default", "aten.cos.default"} <= alone
    assert "aten.relu.default" not in alone


def test_signature_key_uses_the_settings_of_most_of_its_calls(folder: Path) -> None:
    trace = load(folder / "other.jsonl.gz")
    rows = rows_of(trace).set_index("signature")
    contexts = contexts_of(trace, trace.own_calls)
    assert {settings.get("autocast") for settings in contexts.values()} == {"", "cpu:bfloat16"}
    for signature in trace.signatures:
        if signature.number in rows.index:
            assert rows.loc[signature.number, "key"] == key_of_case(signature, contexts[signature.number])


@pytest.mark.parametrize("by", ["op", "shape", "dtype", "model", "family", "signature"])
def test_every_table_counts_all_calls_and_all_time(corpus: Corpus, by: str) -> None:
    table = summarize(corpus, by).table
    assert table["calls"].sum() == corpus.frame["count"].sum()
    assert table.groupby("source")["share"].sum().tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("suffix", [".json", ".csv", ".parquet"])
def test_table_is_written_completely(corpus: Corpus, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"corpus{suffix}"
    summary = summarize(corpus)
    write_summary(corpus, summary, path, force=False)
    if suffix == ".json":
        form = json.loads(path.read_text())
        assert form["models"] == {"trace": 3, "dlop": 1}
        rows = pd.DataFrame(form["rows"])
    else:
        rows = pd.read_csv(path) if suffix == ".csv" else pd.read_parquet(path)
    assert rows["op"].tolist() == summary.table["op"].tolist()
    assert rows["calls"].tolist() == summary.table["calls"].tolist()
    with pytest.raises(UserError, match="exists"):
        write_summary(corpus, summary, path, force=False)


def test_csv_cells_contain_no_formulas_and_numbers_are_bounded(corpus: Corpus, tmp_path: Path) -> None:
    write_table(summarize(corpus).table.assign(op="=cmd|calc"), tmp_path / "c.csv", False, {})
    assert ",'=cmd" in "," + (tmp_path / "c.csv").read_text().splitlines()[1]
    signature = load(corpus.members[0].path).signatures[-1]
    endless = map_leaves(
        lambda leaf: replace(leaf, shape=[2**40] * 2) if isinstance(leaf, TensorSpec) else leaf, signature.args
    )
    assert signature_facts(replace(signature, args=endless), {})["elements"] == MOST_ELEMENTS


def test_signatures_are_written_once_with_their_keys_and_values(corpus: Corpus, tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl.zst"
    keys = corpus.frame["key"].unique().tolist()
    assert write_cases(corpus, keys, path) == len(keys)
    trace = load(path, partial=False)
    rows = rows_of(trace)
    assert dict(zip(rows["signature"], rows["key"], strict=True)) == dict(enumerate(keys))
    assert rows["count"].eq(1).all()
    assert set(trace.calls["module"]) == {"small", "other", "tiny", "dlop"}
    index = next(item for item in trace.signatures if item.op == "aten.embedding.default")
    assert trace.values[index.args[1].values].draw((2, 6), torch.int64, torch.Generator()).max() < 10


def test_invalid_input_is_reported_in_one_line(folder: Path, tmp_path: Path) -> None:
    for inputs, message in (
        ([str(folder / "no.jsonl")], "does not exist"),
        ([str(folder / "notes.txt")], "is not a trace"),
        (["zoo:no_such_model"], "no trace of the zoo"),
        ([str(tmp_path)], "contains no trace"),
    ):
        with pytest.raises(UserError, match=message):
            read_corpus(inputs)


def test_broken_file_in_a_folder_is_left_out_and_reported(tmp_path: Path) -> None:
    captured(tmp_path / "whole.jsonl", small)
    header = (tmp_path / "whole.jsonl").read_text().splitlines()[0]
    (tmp_path / "newer.jsonl").write_text(header.replace('"version":"1.', '"version":"9.') + "\n")
    (tmp_path / "cut.jsonl").write_text("".join((tmp_path / "whole.jsonl").read_text().splitlines(True)[:-1]))
    corpus = read_corpus([str(tmp_path)])
    assert {member.name for member in corpus.members} == {"whole.jsonl", "cut.jsonl"}
    assert any("newer" in note for note in corpus.notes)
    assert any("cut" in note for note in corpus.notes)


def test_model_is_read_from_the_header(tmp_path: Path) -> None:
    write(tmp_path / "any.jsonl", model={"name": "net", "run": "train", "packages": {"mmcv": "2", "mmdet": "3"}})
    member = read_corpus([str(tmp_path / "any.jsonl")]).members[0]
    assert (member.model, member.run, member.library) == ("net", "train", "mmdet")


CONV = {
    "input": [[1, 3, 8, 8], [2, 3, 8, 8]],
    "weight": [[4, 3, 3, 3], [4, 3, 3, 3]],
    "bias": [[4], [4]],
    "stride": [[1, 1], [1, 1]],
    "padding": [[0, 0], [0, 0]],
    "dilation": [[1, 1], [1, 1]],
    "groups": [[1], [1]],
}
ERF = {"input": [[2, 3], [4, 3]]}


@pytest.fixture(scope="module")
def mixed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mixed_folder = tmp_path_factory.mktemp("corpus")
    train_tiny_net(mixed_folder / "tiny.jsonl")
    with Capture(mixed_folder / "small.jsonl"):
        torch.randn(8, 8).relu().sin()
    (mixed_folder / "conv2d.json").write_text(json.dumps(CONV))
    (mixed_folder / "erf.json").write_text(json.dumps(ERF))
    return mixed_folder


@pytest.mark.slow
def test_corpus_has_a_table_per_source(mixed_folder: Path, tmp_path: Path) -> None:
    done = run_command("opgrip", "corpus", mixed_folder, "-o", tmp_path / "corpus.json")
    assert done.returncode == 0
    assert re.fullmatch(r"opgrip corpus: wrote \d+ rows to .*corpus\.json\n", done.stderr)
    assert "\x1b" not in done.stdout
    assert "trace: 2 models, 2 traces, " in done.stdout
    assert "dlop: 1 model, 2 traces, 4 calls, 4 signatures, 2 operators" in done.stdout
    form = json.loads((tmp_path / "corpus.json").read_text())
    assert {row["op"] for row in form["rows"] if row["source"] == "dlop"} == {"aten.conv2d.default", "aten.erf.default"}


def test_coverage_counts_operators_without_their_variants(mixed_folder: Path) -> None:
    public = public_operators()
    assert {"aten.add", "aten.convolution", "aten.relu", "aten.sin"} <= public
    assert not {"aten.add_", "aten.conv2d", "aten._softmax"} & public
    table = cover(read_corpus([str(mixed_folder / "small.jsonl")])).set_index("op")
    assert table.index[table["is_covered"]].tolist() == ["aten.randn", "aten.relu", "aten.sin"]
    summary = summarize_coverage(table.reset_index()).set_index("category")
    assert summary["covered"].sum() == 3
    assert summary["operators"].sum() == len(public)
    assert "relu" not in summary.loc["activation", "missing"].split(", ")
    assert "hardswish" in summary.loc["activation", "missing"].split(", ")


@pytest.fixture(scope="module")
def page(mixed_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "corpus.html"
    succeed("opgrip", "report", mixed_folder, mixed_folder / "small.jsonl", "-o", path)
    return path


@needs("plotly", "itables")
@pytest.mark.slow
def test_report_of_a_folder_has_all_tables_of_the_corpus(page: Path) -> None:
    text = page.read_text()
    form = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert set(form["corpus"]["tables"]) == {"op", "shape", "dtype", "signature", "model", "family", "coverage"}
    assert len(form["corpus"]["members"]) == 4
    assert len(form["traces"]) == 1
    columns = [column["name"] for column in form["corpus"]["tables"]["op"]["columns"]]
    ops = [row[columns.index("op")] for row in form["corpus"]["tables"]["op"]["rows"]]
    assert {"aten.sin.default", "aten.conv2d.default"} <= set(ops)
    covered = form["corpus"]["tables"]["coverage"]
    names = [column["name"] for column in covered["columns"]]
    kinds = {row[0]: dict(zip(names, row, strict=True)) for row in covered["rows"]}
    elementwise = kinds["elementwise"]
    assert 0 < elementwise["covered"] < elementwise["of_torch"]
    percent = 100 * elementwise["covered"] / elementwise["of_torch"]
    assert elementwise["part_covered"] == pytest.approx(percent, rel=1e-4)
    assert "cos" in elementwise["missing"].split(", ")


@in_browser
def test_corpus_page_works_in_a_browser(page: Path) -> None:
    with opened(page, "/corpus") as browser:
        browser.wait_for_selector("table.dataTable tbody tr td")
        browser.locator("select").first.select_option("model")
        browser.wait_for_selector("table.dataTable td:has-text('tiny')")
        browser.locator("select").first.select_option("coverage")
        browser.wait_for_selector("table.dataTable td:has-text('elementwise')")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no.jsonl"], "no.jsonl does not exist"),
        (["zoo:nothing"], "no trace of the zoo"),
        (["small.jsonl", "--models", "some"], "is not a number ('2')"),
        (["small.jsonl", "--models", "0"], "does not contain a possible number of models"),
        (["small.jsonl", "--models", "1", "--by", "model"], "cannot be used with"),
        (["small.jsonl", "-o", "corpus.txt"], "corpus.txt is not the name of"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(mixed_folder: Path, words: list[str], message: str) -> None:
    assert message in refusal("opgrip", "corpus", *words, cwd=mixed_folder, in_one_line=True)


SHIPPED = SHIPPED_TRACES[0]


@pytest.fixture(scope="module")
def distilled_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    distilled_folder = tmp_path_factory.mktemp("distill")
    small_trace(distilled_folder / "net.predict.jsonl", (10, 20, 30, 1000))
    small_trace(distilled_folder / "net.train.jsonl", (10, 500, 700))
    small_trace(distilled_folder / "other.predict.jsonl", (7, 100_000))
    return distilled_folder


@pytest.fixture(scope="module")
def run(distilled_folder: Path) -> Results:
    return replay(distilled_folder / "other.predict.jsonl", iterations=2)


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


def test_each_trace_is_represented_completely(distilled_folder: Path) -> None:
    corpus = read_corpus([str(distilled_folder)])
    distilled = distill(corpus, 3)
    assert len(distilled.keys) == 3
    whole = corpus.frame.groupby("trace")["time_us"].sum()
    for trace, weights in distilled.weights_us.items():
        assert sum(weights.values()) == pytest.approx(whole[trace])
        assert distilled.predicted_us(trace, distilled.times_us) == pytest.approx(whole[trace])


def test_uniform_slowdown_is_predicted_exactly(distilled_folder: Path) -> None:
    corpus = read_corpus([str(distilled_folder)])
    distilled = distill(corpus, 2)
    frame = corpus.frame
    times = {
        (trace, key): 2 * us for trace, key, us in zip(frame["trace"], frame["key"], frame["median_us"], strict=True)
    }
    checks = check_of(corpus, distilled, times)
    assert len(checks) == 3
    assert [item.error for item in checks] == pytest.approx([0.0] * 3)


def run_of(distilled_folder: Path, path: Path, factors: dict[str, float]) -> Path:
    corpus = named_by_files(read_corpus([str(distilled_folder)]))
    cases = zip(*(corpus.frame[name].tolist() for name in ("trace", "model", "key")), strict=True)
    rows = []
    for number, (trace, model, key) in enumerate(cases):
        us = 10.0 * (1 + int(key, 16) % 7) * factors[model]
        rows.append(Origin(trace, model).marked(make_row(number, [us], key=key)))
    Results(rows, HEADER).save(path)
    return path


def test_check_with_another_replay_names_the_mispredicted_model(distilled_folder: Path, tmp_path: Path) -> None:
    one = run_of(distilled_folder, tmp_path / "one.json", {"net": 1.0, "other": 1.0})
    two = run_of(distilled_folder, tmp_path / "two.json", {"net": 1.01, "other": 1.515})
    options = ("--cases", "1", "--times", one, "--check", two, "-o", "bench.jsonl")
    done = succeed("opgrip", "corpus", "distill", distilled_folder, *options, cwd=tmp_path)
    # with a single case, from one of the models, the other model's times are predicted to change like this case
    assert "the times of 1 of 2 models are predicted within 10%" in done.stdout
    errors = {line.split()[0]: line.split()[-1] for line in done.stdout.splitlines() if line.endswith("%")}
    assert (errors["net"], errors["other"]) in {("+0.0%", "-33.3%"), ("+50.0%", "+0.0%")}


def test_check_with_the_times_of_the_choice_is_refused(distilled_folder: Path, tmp_path: Path) -> None:
    one = run_of(distilled_folder, tmp_path / "one.json", {"net": 1.0, "other": 1.0})
    two = run_of(distilled_folder, tmp_path / "two.json", {"net": 1.0, "other": 1.5})
    copy = tmp_path / "copy.json"
    copy.write_bytes(one.read_bytes())
    for runs in ((one,), (copy,), (two, copy)):
        checks = [word for run in runs for word in ("--check", run)]
        options = ("--times", one, *checks, "-o", "bench.jsonl")
        error = refusal("opgrip", "corpus", "distill", distilled_folder, *options, cwd=tmp_path, in_one_line=True)
        assert "has the same times as --times" in error
        assert "replay the traces again" in error
        assert not (tmp_path / "bench.jsonl").exists()


@pytest.mark.slow
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


def test_distilled_file_is_a_trace_whose_replay_has_a_score(distilled_folder: Path, tmp_path: Path) -> None:
    bench = tmp_path / "bench.jsonl"
    done = succeed("opgrip", "corpus", "distill", distilled_folder, "--cases", "4", "-o", bench, cwd=tmp_path)
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


def test_files_of_one_name_are_separate_traces(distilled_folder: Path, tmp_path: Path) -> None:
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


@pytest.mark.slow
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


TRACES = read_manifest()

MADE = [trace for trace in TRACES if trace.recording is not None]

MOST_BYTES = 25_000_000  # limit of the size of all files together


def names_of(traces: list[ZooTrace]) -> list[str]:
    return [trace.name for trace in traces]


def test_manifest_survives_reading_and_writing(tmp_path: Path) -> None:
    write_manifest(TRACES, tmp_path / "zoo.json")
    assert read_manifest(tmp_path / "zoo.json") == TRACES
    assert (tmp_path / "zoo.json").read_bytes() == (ROOT / "traces" / "zoo.json").read_bytes()


def test_names_are_unique_and_a_model_has_one_library_and_family() -> None:
    assert len(set(names_of(TRACES))) == len(TRACES)
    about = {(trace.model, trace.library, trace.family) for trace in TRACES}
    assert len(about) == len({trace.model for trace in TRACES})


def test_traces_are_selected_by_name_model_library_and_family() -> None:
    trace = next(trace for trace in TRACES if trace.library == "mmdet" and trace.run == "train")
    assert names_of(select([trace.name], TRACES)) == [trace.name]
    assert trace.name in names_of(select([trace.model], TRACES))
    assert {item.library for item in select(["mmdet"], TRACES)} == {"mmdet"}
    assert {item.family for item in select([trace.family], TRACES)} == {trace.family}
    assert {item.run for item in select(["*.train"], TRACES)} == {"train"}
    assert select([], TRACES) == TRACES


def test_pattern_without_a_match_gets_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"no trace of the zoo matches 'mmdt': did you mean mmdet\?"):
        select(["mmdt"], TRACES)
    with pytest.raises(UserError, match=r"no trace of the zoo matches 'bert': did you mean 'bert\*'\?"):
        select(["bert"], TRACES)


def test_recipes_are_arguments_of_opcapture_without_an_output() -> None:
    parser = make_parser()
    for trace in TRACES:
        args = parser.parse_args(list(trace.arguments))
        assert (args.output, args.audit) == (None, False), trace.name
        assert trace.run == "-".join(filter(None, (args.run, args.autocast))), trace.name
        assert trace.inputs, trace.name


def test_files_are_those_that_the_manifest_describes() -> None:
    described = {trace.name: (trace.recording.size_bytes, trace.recording.sha256) for trace in MADE if trace.recording}
    data = {trace.name: zoo_file(trace).read_bytes() for trace in MADE}
    assert {name: (len(text), sha256(text).hexdigest()) for name, text in data.items()} == described


def test_files_are_those_of_the_manifest_and_together_small() -> None:
    assert {path.name for path in MODELS.glob(f"*{SUFFIX}")} == {f"{trace.name}{SUFFIX}" for trace in MADE}
    assert sum(path.stat().st_size for path in MODELS.glob(f"*{SUFFIX}")) <= MOST_BYTES


def test_wheel_names_existing_files() -> None:
    files = pyproject()["tool"]["setuptools"]["package-data"]["opgrip.traces.zoo"]
    assert files
    assert [name for name in files if not (ROOT / "traces" / "zoo" / name).is_file()] == []


def counts_on_the_page() -> dict[str, int]:
    text = (ROOT / "docs" / "zoo.md").read_text()
    line = re.search(
        r"^Over all of them \((?P<traces>\S+) traces\) there are \*\*(?P<operators>\S+) operators\*\*, "
        r"(?P<extension_functions>\S+) of them functions of extensions \(mmcv's\), "
        r"and \*\*(?P<longtail>\S+) long-tail functions\*\* that ",
        text,
        re.MULTILINE,
    )
    assert line is not None
    return {name: int(number.replace(",", "")) for name, number in line.groupdict().items()}


def test_zoo_has_the_required_size() -> None:
    counts = counts_on_the_page()
    assert counts["traces"] == len(MADE)
    assert counts["operators"] >= 300
    assert counts["longtail"] >= 250
    assert len({trace.model for trace in MADE}) >= 40


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_page_of_the_zoo_has_the_current_counts() -> None:
    assert asdict(count_distinct(TRACES)) == counts_on_the_page()


# the page's counts need all traces, so each of them is read
@pytest.mark.slow
@pytest.mark.parametrize("trace", MADE[::8], ids=names_of(MADE[::8]))
def test_trace_is_valid_and_equals_its_manifest_entry(trace: ZooTrace) -> None:
    succeed("opgrip", "trace", "validate", f"zoo:{trace.name}")
    assert trace.recording is not None
    held = record_of(zoo_file(trace), trace, trace.recording.step_ms)
    assert replace(held, versions=trace.recording.versions) == trace.recording
    assert load(f"zoo:{trace.name}").header["command"] == ["opcapture", *trace.arguments]


def test_trace_loads_by_its_name() -> None:
    trace = MADE[0]
    assert trace.recording is not None
    assert len(load(f"zoo:{trace.name}").own_calls) == trace.recording.calls


def test_trace_that_is_not_installed_names_its_package() -> None:
    with pytest.raises(MissingFileError, match=r"absent\.predict of the zoo is not installed: .* opgrip-zoo"):
        zoo_file(replace(TRACES[0], model="absent", run="predict"))


@pytest.mark.slow
def test_packed_trace_has_equal_calls_and_values_and_its_recipe(tmp_path: Path) -> None:
    path = SHIPPED_TRACES[0]
    trace = ZooTrace("m", "predict", "mmdet", "two-stage", ["--model", "m.py"])
    packed = pack(path, trace, tmp_path / "m.predict.jsonl.zst")
    assert command_of(packed) == ["opcapture", "--model", "m.py"]
    difference = compare_traces(load(path), load(packed), ("plain", "packed"))
    assert difference.changed == []
    assert [name for name, *_ in difference.facts] == ["command"]
    assert packed.stat().st_size < path.stat().st_size / 6


SMALL = ("--model", "builtin:faster_rcnn", "--input-size", "96", "--batch-size", "1", "--steps", "1")
DETECTOR = ZooTrace("small", "predict", "opgrip", "two-stage", [*SMALL], "1 image of 96x96")
ENDS = """
import os, signal, time
from torch import nn, ones

def killed():
    os.kill(os.getpid(), signal.SIGKILL)

def hangs():
    time.sleep(600)

def fails():
    raise RuntimeError("no weights")

def other():
    return nn.Linear(2, 2), ones(1, 2)
"""


def bad(tmp_path: Path, name: str) -> ZooTrace:
    (tmp_path / "ends.py").write_text(ENDS)
    return ZooTrace(name, "predict", "opgrip", "none", ["--model", f"{tmp_path / 'ends.py'}:{name}", "--steps", "1"])


def test_zoo_traces_are_listed_one_per_line_and_filtered() -> None:
    header, *lines = run_command("opgrip", "zoo", "list").stdout.splitlines()
    assert header.split("\t")[0::8] == ["name", "installed"]
    assert {line.split("\t")[-1] for line in lines} == {"yes"}
    assert [line.split("\t")[0] for line in lines] == [trace.name for trace in read_manifest()]
    train = run_command("opgrip", "zoo", "list", "*.train").stdout.splitlines()[1:]
    assert {line.split("\t")[0].partition(".")[2] for line in train} == {"train"}
    refusal("opgrip", "zoo", "list", "no_such*", in_one_line=True)


def test_zoo_verbs_do_not_load_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["zoo", "list", "bert-base.predict"]) == 0
    assert main(["zoo", "show", "bert-base.predict"]) == 0


def test_zoo_show_prints_the_commands_that_make_and_replay_a_trace() -> None:
    shown = run_command("opgrip", "zoo", "show", "built-in_faster-rcnn.predict").stdout
    assert "made by     opcapture --model builtin:faster_rcnn" in shown
    assert "run it      opreplay zoo:built-in_faster-rcnn.predict" in shown


@pytest.mark.slow
def test_made_trace_has_its_figures_in_the_manifest(tmp_path: Path) -> None:
    held, content = zoo.make_trace(DETECTOR, tmp_path).recording, load(tmp_path / f"small.predict{SUFFIX}")
    assert held is not None
    assert (held.calls, held.steps) == (len(content.own_calls), 1)
    assert held.signatures == len(content.signatures)
    assert held.size_bytes == (tmp_path / f"small.predict{SUFFIX}").stat().st_size
    assert held.step_ms > 0
    assert held.longtail > 0
    assert {"torch", "opgrip"} <= held.versions.keys()
    # shipped traces do not contain the machine's paths
    assert content.header["command"] == ["opcapture", *SMALL]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [("killed", "ended by SIGKILL"), ("hangs", "took longer than 15 s"), ("fails", "no weights")],
)
def test_failing_model_loses_only_its_trace(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        zoo.make_trace(bad(tmp_path, name), tmp_path / "models", timeout_s=15)
    assert not list(tmp_path.glob("models/*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package"), [("fast-scnn.predict", "mmseg"), ("centernet_r18-dcnv2.predict", "mmdet")]
)
def test_remade_shipped_trace_is_equal(name: str, package: str) -> None:
    optional(package)
    done = succeed("opgrip", "zoo", "make", "--check", name)
    assert f"{name}: 0 signatures differ" in done.stderr
