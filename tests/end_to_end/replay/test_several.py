"""Several traces in one run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from example_trace import small_trace
from made_runs import make_row
from programs import refusal, run_command, succeed

from opgrip.cli.progress import SilentReporter
from opgrip.errors import UserError
from opgrip.replay import Results, compare, replay
from opgrip.replay.command.job import job_from_keywords
from opgrip.replay.command.replay import plan
from opgrip.replay.command.several_traces import SeveralTraces, targets_of
from opgrip.replay.command.trace_replay import OneTrace, Ranks, Step
from opgrip.replay.reports.results_table import distinct_inputs
from opgrip.replay.results.origins import Machine
from opgrip.replay.results.results import Result
from opgrip.replay.workers.journal import ReplayJournal, journal_path
from opgrip.traces.zoo import read_manifest
from opgrip.traces.zoo.manifest import FIELD
from opgrip.zoo.corpus import read_corpus
from opgrip.zoo.corpus.distill import distill, write_cases

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
    done = succeed("opreplay", folder, *FAST, "-o", output, cwd=folder)
    assert "3 of 3, other.predict" in done.stderr
    assert "6 cases: 5 ok, 1 unsupported" in done.stderr
    assert "no baseline: net.predict" in done.stdout
    return output


def test_each_row_names_its_trace_and_model(results: Path) -> None:
    rows = Results.load(results).frame
    assert rows.groupby("trace", sort=False).size().to_dict() == {"net.predict": 2, "net.train": 2, "other.predict": 2}
    assert set(rows.loc[rows["model"] == "net", "run"]) == {"predict", "train"}
    assert Results.load(results).header["traces"]["other.predict"]["model"] == "other"
    assert not journal_path(results).exists()


def test_equal_cases_of_several_traces_are_compared_by_trace(results: Path) -> None:
    run = Results.load(results)
    assert len({row.identity_without() for row in run}) == len(run)
    comparison = compare(run, run)
    assert [(pair.base.trace, pair.new.trace) for pair in comparison.pairs if pair.base.trace != pair.new.trace] == []
    assert len(comparison.pairs) == 5


def test_unreadable_trace_loses_only_its_own_rows(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{}\n")
    output = tmp_path / "r.json"
    done = succeed("opreplay", broken, folder / "net.predict.jsonl", *FAST, "-o", output, cwd=tmp_path)
    assert "1 of 2 traces not replayed: broken" in done.stderr
    rows = Results.load(output).frame
    assert set(rows["trace"]) == {"net.predict"}
    assert "broken" in Results.load(output).header["traces"]["broken"]["problem"]
    done = run_command("opreplay", broken, folder / "net.predict.jsonl", *FAST, "--strict", cwd=tmp_path)
    assert done.returncode == 1


def test_resume_keeps_the_rows_of_a_complete_trace(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    files, output = [folder / "net.predict.jsonl", folder / "net.train.jsonl"], tmp_path / "r.json"
    options = {"iterations": 3, "warmup": 0, "cache": "warm", "output": output}
    once, calls = SeveralTraces._run_one, []

    def interrupt_second(self: SeveralTraces, place: int, *others: Any) -> bool:
        calls.append(place)
        return True if place else once(self, place, *others)

    monkeypatch.setattr(SeveralTraces, "_run_one", interrupt_second)
    with pytest.raises(KeyboardInterrupt):
        replay(files, **options)
    monkeypatch.undo()
    records = [json.loads(line) for line in journal_path(output).read_text().splitlines()[1:]]
    times = [row["times_us"] for record in records if isinstance(record, list) for row in record]
    assert len(times) == 2
    rows = replay(files, **options, resume=True).rows
    assert [row.times_us for row in rows if row.trace == "net.predict"] == times
    assert {row.trace for row in rows} == {"net.predict", "net.train"}


def test_resume_refuses_rows_of_other_options(folder: Path, tmp_path: Path) -> None:
    journal_path(tmp_path / "r.json").write_text('{"traces": [], "options": {}}\n')
    error = refusal("opreplay", folder, *FAST, "-o", tmp_path / "r.json", "--resume", cwd=tmp_path)
    assert "contains rows of a replay of other traces or with other options" in error


@pytest.mark.parametrize("flag", ["--sequence", "--nsys", "--ncu", "--profile", "--roofline", "--sweep"])
def test_options_for_one_trace_are_refused_in_one_line(folder: Path, flag: str) -> None:
    error = refusal("opreplay", folder, flag, cwd=folder)
    assert error == f"opreplay: error: {flag} is for one trace: name only one trace\n"


def test_top_applies_to_each_trace(folder: Path) -> None:
    results = replay(folder, top=1, iterations=2, warmup=0, cache="warm")
    assert [row.trace for row in results] == ["net.predict", "net.train", "other.predict"]


def test_zoo_traces_are_selected_by_patterns() -> None:
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
    with pytest.raises(UserError, match=r"sample:nms is a sample, .*: name several samples as sample:NAME,NAME"):
        targets_of(["sample:nms", "sample:delta2bbox"])


def test_traces_of_one_name_get_distinct_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        small_trace(tmp_path / name / "net.predict.jsonl", (10,))
    paths = [str(tmp_path / name / "net.predict.jsonl") for name in ("a", "b")]
    targets = targets_of([*paths, paths[0]])
    assert targets is not None
    assert [target.origin.trace for target in targets] == ["net.predict", "net.predict~2"]


def own_folder(path: Path, *sizes: int) -> Path:
    path.mkdir(exist_ok=True)
    small_trace(path / f"{path.name}.jsonl", sizes)
    return path


QUICK: dict[str, Any] = {"iterations": 1, "warmup": 0, "cache": "warm"}


@pytest.fixture(scope="module")
def mixed_folder(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    mixed = tmp_path_factory.mktemp("mixed")
    for name in ("a", "b", "c"):
        shutil.copy(folder / "net.predict.jsonl", mixed / f"{name}.jsonl")
    shutil.copy(folder / "other.predict.jsonl", mixed / "d.jsonl")
    return mixed


def test_traces_without_a_selected_operator_are_reported_in_one_line(mixed_folder: Path) -> None:
    done = run_command("opreplay", mixed_folder, "--op", "nothing*", *FAST, cwd=mixed_folder)
    # its one case needs an extension
    assert done.returncode == 1, done.stderr
    assert "opreplay: no op matches --op nothing* in 3 of 4 traces\n" in done.stderr
    assert done.stderr.count("no op matches") == 1
    assert "not replayed" not in done.stderr
    assert "nothing._ext" in done.stdout + done.stderr


def test_inputs_that_several_traces_share_are_one_row(folder: Path) -> None:
    done = succeed("opreplay", folder, "--op", "aten.add*", *FAST, cwd=folder)
    _, header, *lines = done.stdout.splitlines()
    assert header.split()[:4] == ["share", "of", "these", "trace"]
    rows = [line.split() for line in lines if "aten.add.Tensor" in line]
    assert len(rows) == 4
    (shared,) = [row for row in rows if "traces" in row]
    assert shared[1:3] == ["2", "traces"]
    assert "4" in shared


def test_worst_input_is_first() -> None:
    def row(trace: str, key: str, **cells: Any) -> Result:
        return replace(make_row(0, [10.0]), trace=trace, key=key, **cells)

    rows = [
        row("a", "quick", ratio=0.5),
        row("a", "slow", ratio=2.0),
        row("b", "slow", ratio=4.0),
        row("b", "broken", status="failed", median_us=None),
    ]
    inputs = distinct_inputs(rows)
    assert [item.key for item in inputs] == ["broken", "slow", "quick"]
    assert (inputs[1].ratio, inputs[1].trace, inputs[1].count) == (4.0, "2 traces", rows[1].count + rows[2].count)
    assert sum(item.share for item in inputs) == pytest.approx(1.0)


def test_pattern_that_no_trace_matches_is_an_error(mixed_folder: Path) -> None:
    error = refusal("opreplay", mixed_folder, "--op", "absent*", "--list", cwd=mixed_folder)
    assert error.splitlines()[-1].startswith("opreplay: error: no op matches --op absent* in 4 of 4 traces: ")
    assert error.count("no op matches") == 1


def test_several_traces_do_not_count_as_a_distilled_set(tmp_path: Path) -> None:
    corpus = read_corpus([str(small_trace(tmp_path / "net.jsonl", (10,)))])
    distilled = distill(corpus, 1)
    write_cases(corpus, distilled.keys, tmp_path / "bench.jsonl", fields={FIELD: distilled.field(corpus)})
    header = replay([tmp_path / "bench.jsonl", tmp_path / "net.jsonl"], **QUICK).header
    assert FIELD not in header
    assert header["traces"].keys() == {"bench", "net"}


@pytest.mark.filterwarnings("ignore:.*not replayed:UserWarning")
def test_append_adds_rows_with_the_facts_of_their_traces(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    broken = own_folder(tmp_path / "broken", 1)
    (broken / "another.jsonl").write_text("{}\n")
    first = replay(broken, **QUICK, output=output)
    second = replay(own_folder(tmp_path / "a", 10), **QUICK, output=output, append=True)
    whole = Results.load(output)
    assert [row.trace for row in whole] == ["broken", "a"]
    assert whole.header["traces"] == {**first.header["traces"], **second.header["traces"]}
    assert whole.header["traces"]["another"]["problem"]
    assert whole.header["trace"] == f"{broken} {tmp_path / 'a'}"
    assert whole.header["trace_hash"] not in (first.header["trace_hash"], second.header["trace_hash"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*not replayed:UserWarning")
def test_append_refuses_rows_that_exist(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    one, other = own_folder(tmp_path / "a", 10), own_folder(tmp_path / "b", 20)
    replay(one, **QUICK, output=output)
    written = output.read_bytes()
    with pytest.raises(UserError, match="rows of the trace a with the same options: leave the trace out"):
        replay(one, **QUICK, output=output, append=True)
    assert output.read_bytes() == written
    assert not journal_path(output).exists()
    replay([one / "a.jsonl", other / "b.jsonl"], **QUICK, output=output, append=True)
    replay(one, **QUICK, threads=1, output=output, append=True)
    whole = Results.load(output)
    assert [(row.trace, row.threads) for row in whole] == [("a", None), ("b", None), ("a", 1)]
    assert all("problem" not in about for about in whole.header["traces"].values())
    small_trace(one / "a.jsonl", (11,))
    with pytest.raises(UserError, match="has rows of another trace named"):
        replay(one, **QUICK, output=output, append=True)


def test_resume_refuses_rows_of_another_torch_or_machine_or_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, output = own_folder(tmp_path / "a", 10), tmp_path / "r.json"
    with monkeypatch.context() as patch:
        once = SeveralTraces._run_one
        patch.setattr(SeveralTraces, "_run_one", lambda *args: once(*args) or True)
        with pytest.raises(KeyboardInterrupt):
            replay(one, **QUICK, output=output)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "1.0")
        with pytest.raises(UserError, match=r"journal contains rows of a replay with another version of torch"):
            replay(one, **QUICK, output=output, resume=True)
    with monkeypatch.context() as patch:
        patch.setattr("opgrip.replay.command.several_traces.this_machine", lambda device: Machine("m", "another"))
        with pytest.raises(UserError, match=r"r\.json\.journal contains rows of a replay on another kind of machine"):
            replay(one, **QUICK, output=output, resume=True)
    small_trace(one / "a.jsonl", (11,))
    with pytest.raises(UserError, match=r"r\.json\.journal contains rows of a replay of different files named a: use"):
        replay(one, **QUICK, output=output, resume=True)
    small_trace(one / "a.jsonl", (10,))
    assert len(replay(one, **QUICK, output=output, resume=True)) == 1


def test_plan_decides_between_one_trace_a_step_ranks_and_several_traces(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kind(*traces: Path, **options: Any) -> type:
        return type(plan(job_from_keywords(traces, options), SilentReporter("opgrip")))

    one = folder / "net.predict.jsonl"
    assert (kind(one), kind(one, sequence=True)) == (OneTrace, Step)
    assert (kind(folder), kind(one, folder / "net.train.jsonl", sequence=True)) == (SeveralTraces, SeveralTraces)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert kind(one, sequence=True) is Ranks


def test_rows_are_kept_once_if_a_replay_is_killed_while_it_finishes_a_trace(tmp_path: Path) -> None:
    rows = [replace(make_row(case, [10.0]), trace="a") for case in range(3)]

    def opened(resume: bool) -> ReplayJournal:
        return ReplayJournal(tmp_path / "r.json", {}, resume, False, {"a": "00"})

    with opened(resume=False) as journal:
        journal.finish("a", rows, {"trace_hash": "00"})
    path = journal_path(tmp_path / "r.json")
    # without the last line, which closes the trace
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    with opened(resume=True) as journal:
        assert not journal.finished
        journal.finish("a", rows, {"trace_hash": "00"})
    with opened(resume=True) as journal:
        assert journal.finished == {"a": (rows, {"trace_hash": "00"})}
