"""Several traces in one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import run_command
from several_traces import small_trace

from opgrip.replay import compare, load_results, replay
from opgrip.replay.outcome import read_run
from opgrip.replay.several.targets import targets_of
from opgrip.traces.errors import UserError
from opgrip.traces.zoo import read_manifest

FAST = ["--iterations", "3", "--warmup", "0", "--cache", "warm"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    small_trace(folder / "net.predict.jsonl")
    small_trace(folder / "net.train.jsonl", (10, 500))
    small_trace(folder / "other.predict.jsonl", (7,), extension="nothing._ext:function")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Path:
    output = folder / "out" / "results.json"
    output.parent.mkdir()
    done = run_command("opreplay", folder, *FAST, "-o", output, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "3 of 3, other.predict" in done.stderr
    assert "6 cases: 5 ok, 1 unsupported" in done.stderr
    assert "no baseline: net.predict" in done.stdout
    return output


def test_each_row_says_which_trace_and_model_it_is_of(results: Path) -> None:
    rows = load_results(results)
    assert rows.groupby("trace", sort=False).size().to_dict() == {"net.predict": 2, "net.train": 2, "other.predict": 2}
    assert set(rows.loc[rows["model"] == "net", "run"]) == {"predict", "train"}
    assert rows.attrs["traces"]["other.predict"]["model"] == "other"
    assert not results.with_name("results.json.parts").exists()


def test_cases_of_several_traces_that_are_alike_are_compared_each_with_its_own(results: Path) -> None:
    run = read_run(results)
    assert len({row.identity for row in run}) == len(run)
    comparison = compare(run, run)
    assert [(pair.base.trace, pair.new.trace) for pair in comparison.pairs if pair.base.trace != pair.new.trace] == []
    assert len(comparison.pairs) == 5


def test_a_trace_that_cannot_be_read_costs_its_own_rows(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{}\n")
    output = tmp_path / "r.json"
    done = run_command("opreplay", broken, folder / "net.predict.jsonl", *FAST, "-o", output, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 of 2 traces not replayed: broken" in done.stderr
    rows = load_results(output)
    assert set(rows["trace"]) == {"net.predict"}
    assert "broken" in rows.attrs["traces"]["broken"]["problem"]
    done = run_command("opreplay", broken, folder / "net.predict.jsonl", *FAST, "--strict", cwd=tmp_path)
    assert done.returncode == 1


@pytest.mark.slow
def test_resume_goes_on_with_the_traces_that_are_missing(folder: Path, tmp_path: Path) -> None:
    output, parts = tmp_path / "r.json", tmp_path / "r.json.parts"
    first = [str(folder / "net.predict.jsonl"), str(folder / "net.train.jsonl")]
    assert run_command("opreplay", *first, *FAST, "-o", output, cwd=tmp_path).returncode == 0
    before = load_results(output)
    # as an interrupted run leaves it: the first trace whole, of the second nothing, and no output
    output.unlink()
    parts.mkdir()
    replayed = replay(first[0], iterations=3, warmup=0, cache="warm")
    assert len(replayed) == 2
    done = run_command("opreplay", *first, *FAST, "-o", output, cwd=tmp_path)
    assert done.returncode == 2
    assert "holds the rows of an interrupted replay" in done.stderr
    assert run_command("opreplay", *first, *FAST, "-o", output, "--resume", cwd=tmp_path).returncode == 0
    assert load_results(output)["trace"].tolist() == before["trace"].tolist()
    assert not parts.exists()


def test_resume_keeps_the_rows_of_a_trace_that_was_whole(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opgrip.replay.several import run

    files, output = [folder / "net.predict.jsonl", folder / "net.train.jsonl"], tmp_path / "r.json"
    options = {"iterations": 3, "warmup": 0, "cache": "warm", "output": output}
    once, calls = run.SeveralReplays._run_one, []

    def interrupt_second(self: run.SeveralReplays, place: int, target: run.Target) -> bool:
        calls.append(place)
        return True if place else once(self, place, target)

    monkeypatch.setattr(run.SeveralReplays, "_run_one", interrupt_second)
    with pytest.raises(KeyboardInterrupt):
        replay(files, **options)
    monkeypatch.undo()
    part = next((tmp_path / "r.json.parts").glob("000-*.json"))
    times = [row["times_us"] for row in json.loads(part.read_text())["results"]]
    rows = replay(files, **options, resume=True).rows
    assert [row.times_us for row in rows if row.trace == "net.predict"] == times
    assert {row.trace for row in rows} == {"net.predict", "net.train"}


def test_rows_of_other_options_are_not_gone_on_with(folder: Path, tmp_path: Path) -> None:
    parts = tmp_path / "r.json.parts"
    parts.mkdir()
    (parts / "about.json").write_text('{"traces": [], "options": {}}')
    done = run_command("opreplay", folder, *FAST, "-o", tmp_path / "r.json", "--resume", cwd=tmp_path)
    assert done.returncode == 2
    assert "is of other traces or with other options" in done.stderr


@pytest.mark.parametrize("flag", ["--sequence", "--nsys", "--ncu", "--profile", "--roofline", "--sweep"])
def test_what_is_for_one_trace_is_refused_in_a_line(folder: Path, flag: str) -> None:
    done = run_command("opreplay", folder, flag, cwd=folder)
    assert done.returncode == 2
    assert done.stderr == f"opreplay: error: {flag} is for one trace: name one with it\n"


def test_top_is_of_each_trace(folder: Path) -> None:
    results = replay(folder, top=1, iterations=2, warmup=0, cache="warm")
    assert [row.trace for row in results] == ["net.predict", "net.train", "other.predict"]


def test_the_zoo_is_named_by_patterns() -> None:
    manifest = read_manifest()
    targets = targets_of(["zoo"])
    assert targets is not None
    assert [target.origin.trace for target in targets] == [trace.name for trace in manifest]
    one = targets_of([f"zoo:{manifest[0].library}"])
    assert one is not None
    assert {target.origin.library for target in one} == {manifest[0].library}
    with pytest.raises(UserError, match="no trace of the zoo"):
        targets_of(["zoo:nothing-is-called-so"])
    assert targets_of(["trace:faster_rcnn"]) is None


def test_traces_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        small_trace(tmp_path / name / "net.predict.jsonl", (10,))
    paths = [str(tmp_path / name / "net.predict.jsonl") for name in ("a", "b")]
    targets = targets_of([*paths, paths[0]])
    assert targets is not None
    assert [target.origin.trace for target in targets] == ["net.predict", "net.predict~2"]


def test_several_are_listed(folder: Path) -> None:
    done = run_command("opreplay", folder, "--list", "--top", "1", cwd=folder)
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if line.endswith(":")] == [
        "net.predict:",
        "net.train:",
        "other.predict:",
    ]
