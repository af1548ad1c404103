"""Parts of a replay: shards merged into one run, and the journal from which an interrupted replay resumes."""

import argparse
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from example_trace import small_trace, write
from hypothesis import given
from hypothesis import strategies as st
from made_runs import HEADER, make_row, make_run
from programs import run_command, run_python, succeed

from opgrip.errors import UserError
from opgrip.replay import Results
from opgrip.replay.command.run_requests import request_with
from opgrip.replay.reports.cells import read_completed
from opgrip.replay.reports.comparison.results_store import merge_runs, missing_shards
from opgrip.replay.reports.outcome import write_results
from opgrip.replay.results.origins import Machine
from opgrip.replay.run.request import (
    RunRequest,
    Shard,
    identity,
    settle_shard,
    shard,
    shard_of_environment,
)
from opgrip.replay.run.workload import cost_us, load_workload, take_shard
from opgrip.replay.workers.journal import MACHINE_KIND, ReplayJournal

costs = st.lists(st.integers(1, 10**9), min_size=1, max_size=40)


@given(costs, st.integers(1, 50))
def test_each_case_is_in_exactly_one_shard_of_bounded_size(costs_us: list[int], count: int) -> None:
    parts = [Shard(number, count).select(costs_us) for number in range(1, count + 1)]
    assert [place for part in parts for place in part] == list(range(len(costs_us)))
    for part in parts:
        assert sum(costs_us[place] for place in part) <= sum(costs_us) / count + max(costs_us) + 1


@given(st.lists(costs, min_size=1, max_size=6), st.integers(1, 20))
def test_each_case_of_several_traces_is_in_exactly_one_shard(traces: list[list[int]], count: int) -> None:
    total_us = sum(map(sum, traces))
    selected: list[tuple[int, int]] = []
    for number in range(1, count + 1):
        offset_us = 0
        for trace, costs_us in enumerate(traces):
            own = Shard(number, count, offset_us, total_us)
            places = own.select(costs_us)
            assert own.has_part_of(sum(costs_us)) or not places
            selected += [(trace, place) for place in places]
            offset_us += sum(costs_us)
    assert selected == [(trace, place) for trace, costs_us in enumerate(traces) for place in range(len(costs_us))]


@pytest.mark.slow
def test_shards_of_a_shipped_trace_are_balanced_and_equal_on_workers() -> None:
    job = request_with("trace:faster_rcnn", shard="2/4")
    whole = load_workload(replace(job, shard=None))
    parts = [take_shard(whole.cases, whole, Shard(number, 4)) for number in range(1, 5)]
    assert sorted(case.number for part in parts for case in part) == sorted(case.number for case in whole.cases)
    loads = [sum(cost_us(case, whole) for case in part) for part in parts]
    longest = max(cost_us(case, whole) for case in whole.cases)
    assert max(loads) <= sum(loads) / 4 + longest
    shares = [case.share for case in parts[1]]
    assert shares == sorted(shares, reverse=True)
    # sent as to a worker process
    same = load_workload(RunRequest.from_plain(json.loads(json.dumps(asdict(job)))))
    assert [case.number for case in same.cases] == [case.number for case in parts[1]]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "2", "WORLD_SIZE": "8"}, "3/8"),
        ({"SLURM_ARRAY_TASK_ID": "7", "MIN": "1", "MAX": "16", "COUNT": "16"}, "7/16"),
        ({"SLURM_ARRAY_TASK_ID": "0", "MIN": "0", "MAX": "6", "COUNT": "4", "STEP": "2"}, "1/4"),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, "4/4"),
        (
            {"SLURM_ARRAY_TASK_ID": "2", "MIN": "1", "MAX": "2", "COUNT": "2", "SLURM_PROCID": "0"}
            | {"SLURM_STEP_NUM_TASKS": "4"},
            "5/8",
        ),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "1/2"),
    ],
)
def test_shard_is_read_from_launcher_variables(variables: dict[str, str], expected: str) -> None:
    short = ("MIN", "MAX", "COUNT", "STEP")
    full = {f"SLURM_ARRAY_TASK_{name}" if name in short else name: value for name, value in variables.items()}
    assert str(shard_of_environment(full)) == expected


@pytest.mark.parametrize(
    "variables",
    [
        {},
        # a batch script whose processes srun would start
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        {"RANK": "x", "WORLD_SIZE": "8"},
        {"RANK": "8", "WORLD_SIZE": "8"},
        {
            "SLURM_ARRAY_TASK_ID": "5",
            "SLURM_ARRAY_TASK_MIN": "1",
            "SLURM_ARRAY_TASK_MAX": "9",
            "SLURM_ARRAY_TASK_COUNT": "3",
        },
    ],
)
def test_missing_or_invalid_launcher_variables_are_an_error(variables: dict[str, str]) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        shard_of_environment(variables)


@pytest.mark.parametrize("text", ["0/4", "5/4", "1/0", "1", "a/b", "1/4/2", "-1/4", ""])
def test_invalid_shard_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        shard(text)


def test_each_torchrun_process_sees_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6"}.items():
        monkeypatch.setenv(name, value)
    assert settle_shard(Shard(2, 16), Path("a/zoo-{shard}.json")) == Path("a/zoo-02-of-16.json")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"


def test_shard_placeholder_requires_a_shard() -> None:
    with pytest.raises(UserError, match=r"is a placeholder for the number of a shard: add --shard"):
        settle_shard(None, Path("zoo-{shard}.json"))


def comparable(rows: Results) -> list[tuple[object, ...]]:
    return [(row.trace, row.case, row.op, row.count, row.mode, row.status, row.share, row.key) for row in rows]


@pytest.mark.slow
def test_merged_shards_of_several_traces_equal_one_replay(tmp_path: Path) -> None:
    (folder := tmp_path / "shards").mkdir()
    small_trace(folder / "net.predict.jsonl", (10, 1000, 5000))
    small_trace(folder / "net.train.jsonl", (10, 500))
    options = ["--iterations", "2", "--warmup", "0", "--cache", "warm", "-o"]
    assert run_command("opreplay", folder, *options, "whole.json", cwd=tmp_path).returncode == 0
    whole = Results.load(tmp_path / "whole.json")
    for number in (1, 2):
        succeed("opreplay", folder, *options, "p-{shard}.json", "--shard", f"{number}/2", cwd=tmp_path)
    files = sorted(tmp_path.glob("p-*.json"))
    assert [file.name for file in files] == ["p-1-of-2.json", "p-2-of-2.json"]
    done = run_command("opgrip", "results", "merge", *files[1:], "-o", "part.json", cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "opgrip results merge: 1 shard missing: 1"
    assert missing_shards(Results.load(tmp_path / "part.json").header) == [1]
    done = succeed("opgrip", "results", "merge", "part.json", files[0], "-o", "all.json", cwd=tmp_path)
    assert "missing" not in done.stderr
    merged = Results.load(tmp_path / "all.json")
    assert comparable(merged) == comparable(whole)
    assert merged.header["trace_hash"] == whole.header["trace_hash"]
    assert missing_shards(merged.header) == []
    frame = Results.load(tmp_path / "all.json").frame
    assert frame["machine"].notna().all()
    assert list(frame["machine_kind"].unique()) == list(merged.header["machines"].values())


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1,5/2", "1/9999999"])
def test_impossible_shard_in_a_file_is_refused(shard: str) -> None:
    with pytest.raises(
        UserError, match=f"a file is from shard {shard}, which is not a valid shard: make that file again"
    ):
        merge_runs([Results([], {"shard": shard}), Results([], {"shard": shard})])


def shard_of(machine: Machine, number: int, rows: slice) -> Results:
    run = make_run(1, cases=4, repeats=1)
    environment = {**HEADER["environment"], "machine": machine.name}
    header = {**HEADER, "shard": f"{number}/2", "environment": environment}
    return Results([machine.marked(row) for row in run.rows[rows]], header)


def test_shards_of_one_machine_kind_merge_and_of_two_kinds_do_not(tmp_path: Path) -> None:
    one = shard_of(Machine("a", "a processor"), 1, slice(2))
    other = shard_of(Machine("b", "a processor"), 2, slice(2, 4))
    merged = merge_runs([one, other])
    assert merged.header["environment"]["machine"] == "a, b"
    assert [row.added["machine"] for row in merged] == ["a", "a", "b", "b"]
    with pytest.raises(UserError, match="the files differ in machine kind"):
        merge_runs([one, shard_of(Machine("b", "another"), 2, slice(2, 4))])
    with pytest.raises(UserError, match="the files differ in machine:"):
        merge_runs([one, shard_of(Machine("b", "a processor"), 2, slice(1, 4))])
    with pytest.raises(UserError, match="the files are from replays that were split differently, into 2 and 3 shards"):
        merge_runs([one, Results(other.rows, {**other.header, "shard": "2/3"})])
    write_results(merged.rows, merged.header, tmp_path / "m.json", force=False)
    assert Results.load(tmp_path / "m.json").header["machines"] == {"a": "a processor", "b": "a processor"}


@pytest.fixture
def job(tmp_path: Path) -> RunRequest:
    return request_with(write(tmp_path / "t.jsonl"))


def open_journal(output: Path, job: RunRequest, kind: str, resume: bool, force: bool) -> ReplayJournal:
    return ReplayJournal(output, {**identity(job), MACHINE_KIND: kind}, resume, force)


def linked(path: Path) -> None:
    path.symlink_to(path.parent / "precious")


@pytest.mark.parametrize("make", [linked, os.mkfifo, Path.mkdir])
@pytest.mark.parametrize("force", [False, True])
def test_journal_that_is_not_a_regular_file_is_refused(
    tmp_path: Path, job: RunRequest, make: Callable[[Path], None], force: bool
) -> None:
    (tmp_path / "precious").write_text("precious")
    make(tmp_path / "r.json.journal")
    with pytest.raises(UserError, match=r"r\.json\.journal is not a regular file: remove it"):
        open_journal(tmp_path / "r.json", job, "cpu", resume=False, force=force)
    assert (tmp_path / "precious").read_text() == "precious"


def test_journal_with_an_incomplete_header_is_restarted(tmp_path: Path, job: RunRequest) -> None:
    path = tmp_path / "r.json.journal"
    path.write_text('{"trace"')
    journal = open_journal(tmp_path / "r.json", job, "cpu", resume=True, force=False)
    whole = path.read_text()
    with journal:
        assert whole.endswith("}\n")
    assert not path.exists()


def test_journal_with_an_endless_line_is_damaged(
    tmp_path: Path, job: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opgrip.cli.journal.LONGEST_LINE", 1 << 16)
    with (tmp_path / "r.json.journal").open("wb") as file:
        file.truncate(40 << 30)
    with pytest.raises(UserError, match=r"r\.json\.journal is damaged in line 1: start again with --force"):
        open_journal(tmp_path / "r.json", job, "cpu", resume=True, force=False)


def test_resume_refuses_rows_of_another_machine_kind_or_torch(
    tmp_path: Path, job: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_journal(tmp_path / "r.json", job, "A100", resume=False, force=False) as journal:
        journal.add([make_row(0, [1.0])])
    with open_journal(tmp_path / "r.json", job, "A100", resume=True, force=False) as journal:
        assert [*journal.measured("")] == [0]
    message = r"r\.json\.journal contains rows of a replay "
    with pytest.raises(UserError, match=f"{message}on another kind of machine: use the same"):
        open_journal(tmp_path / "r.json", job, "H100", resume=True, force=False)
    monkeypatch.setattr(torch, "__version__", "1.0")
    with pytest.raises(UserError, match=f"{message}with another version of torch: use the same"):
        open_journal(tmp_path / "r.json", job, "A100", resume=True, force=False)


@pytest.mark.parametrize("fact", ["torch", "trace_hash", "options_hash"])
def test_complete_results_are_reused_only_for_the_same_torch_and_trace(tmp_path: Path, fact: str) -> None:
    header = {
        "trace": "t.jsonl",
        "trace_hash": "00",
        "torch": "2.13.0",
        "device": "cpu",
        "seed": 0,
        "options_hash": "1",
    }
    row = make_row(0, [1.0])
    Results([row], header).save(tmp_path / "r.json")
    assert read_completed(tmp_path / "r.json", [row], ["cpu"], [], header) == [row]
    with pytest.raises(UserError, match=r"r\.json contains other results"):
        read_completed(tmp_path / "r.json", [row], ["cpu"], [], {**header, fact: "01"})


# command prefix that limits the size of files, to simulate a full disk
WITHIN = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from opgrip.replay.command.opreplay import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("size", [6_000, 13_000])
@pytest.mark.slow
def test_full_disk_keeps_the_journal_and_prints_how_to_resume(tmp_path: Path, tiny_trace: Path, size: int) -> None:
    words = [str(tiny_trace), "--top", "8", "--iterations", "1", "--warmup", "0", "-o", "r.json"]
    done = run_python("-c", WITHIN, size, *words, cwd=tmp_path)
    assert done.returncode == 2
    *_, hint, error = done.stderr.splitlines()
    again = f"opreplay {' '.join(words)} --resume"
    assert re.fullmatch(rf"opreplay: \d of 8 cases are in r\.json\.journal; continue with: {re.escape(again)}", hint)
    assert error == "opreplay: error: r.json cannot be written: file too large"
    assert not (tmp_path / "r.json").exists()
    assert run_command("opreplay", *words, "--resume", cwd=tmp_path).returncode == 0
    assert len(Results.load(tmp_path / "r.json")) == 8
