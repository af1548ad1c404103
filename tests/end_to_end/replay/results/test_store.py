"""Runs that opreplay stores: facts about their machine, lookup and merging."""

import json
import os
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import HEADER, make_row, make_run
from programs import run_command, succeed

from opgrip.errors import UserError
from opgrip.replay.command.trace_replay import repeat
from opgrip.replay.reports.comparison.comparison import compare
from opgrip.replay.reports.comparison.results_store import Store, merge_runs
from opgrip.replay.reports.comparison.unpaired_ratio import Verdict
from opgrip.replay.reports.outcome import Results, write_results
from opgrip.replay.results.results import Result

FAST = ("--top", "3", "--iterations", "3", "--warmup", "0", "--cache", "warm")


@pytest.fixture(scope="module")
def kept(tiny_trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    environment = os.environ | {"OPGRIP_STORE": "results", "OPGRIP_MACHINE": "a machine/with ../ strange name"}
    for words in ((), ("--repeats", "2")):
        done = succeed("opreplay", tiny_trace, *FAST, *words, cwd=folder, env=environment)
        assert re.search(r"3 rows kept as results/a-machine-with-\.\.-strange-name-cpu/\S+-tiny-\w+", done.stderr)
    return folder / "results"


@pytest.mark.slow
def test_stored_run_describes_its_machine_and_trace(kept: Path, tiny_trace: Path) -> None:
    first, second = Store(kept).runs()
    header = first.load().header
    assert header["command"].startswith("opreplay ")
    assert len(header["trace_hash"]) == 32
    environment = header["environment"]
    assert {
        "machine",
        "system",
        "processor",
        "processors",
        "load",
        "threads",
        "python",
        "versions",
    } <= environment.keys()
    assert environment["versions"]["torch"] == header["torch"]
    assert all(row.repeats is None and len(row.times_us or ()) == row.samples for row in first.load())
    assert all(len(row.repeats or ()) == 2 and sum(row.repeats or ()) == row.samples for row in second.load())
    assert all(row.key and row.phase for row in second.load())


def test_runs_are_listed_and_shown(kept: Path) -> None:
    done = run_command("opgrip", "results", "list", "--store", kept)
    assert done.stdout.count("tiny") >= 2
    listed = json.loads(run_command("opgrip", "results", "list", "--store", kept, "--json").stdout)
    assert [item["cases"] for item in listed] == [3, 3]
    assert run_command("opgrip", "results", "list", "--store", kept, "--trace", "no*").stdout == ""
    shown = run_command("opgrip", "results", "show", "latest", "--store", kept)
    assert "processor" in shown.stdout
    assert shown.stdout.splitlines()[-1] == "3 cases: 3 ok"
    compared = run_command("opgrip", "compare", "latest~1", "latest", "--store", kept)
    assert "3 cases timed in both" in compared.stdout, compared.stderr


def test_run_is_found_by_a_unique_prefix_or_suffix(kept: Path) -> None:
    store = Store(kept)
    first, second = store.runs()
    assert store.find("latest") == second.path
    assert store.find("latest~1") == store.find(first.name) == store.find(first.name[-6:]) == first.path
    assert store.find(str(first.path)) == first.path
    with pytest.raises(UserError, match="names 2 runs"):
        store.find(first.name[:8])
    for name, problem in {"latest~2": "has no run latest~2", "nothing": "is neither a file nor a run in"}.items():
        with pytest.raises(UserError, match=problem):
            store.find(name)


def test_nothing_is_kept_unless_a_folder_is_set(tiny_trace: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OPGRIP_STORE"}
    environment |= {"XDG_DATA_HOME": str(tmp_path), "HOME": str(tmp_path)}
    done = succeed("opreplay", tiny_trace, *FAST, cwd=tmp_path, env=environment)
    assert "kept" not in done.stderr
    assert list(tmp_path.rglob("*.parquet")) == []
    for words in (("show", "latest"), ("list",), ("prune",)):
        done = run_command("opgrip", "results", *words, cwd=tmp_path, env=environment)
        problem = "no folder of results is set: name one with --store, or set $OPGRIP_STORE"
        assert (done.returncode, done.stderr) == (2, f"opgrip results {words[0]}: error: {problem}\n")


def test_all_but_the_newest_runs_are_pruned(tmp_path: Path) -> None:
    results = make_run(1, cases=2)
    paths = sorted(Store(tmp_path).keep(results.rows, results.header) for _ in range(4))
    other = paths[0].with_name("notes.json")
    other.write_text("{}")
    done = succeed("opgrip", "results", "prune", "--keep", 1, "--store", tmp_path)
    assert done.stderr == f"opgrip results prune: removed 3 runs from {tmp_path}, 2 left\n"
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted([paths[-1], other])


def test_unwritable_store_does_not_lose_results(tiny_trace: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = os.environ | {"OPGRIP_STORE": str(tmp_path / "file")}
    done = succeed("opreplay", tiny_trace, *FAST, env=environment)
    assert "the results are not stored: " in done.stderr
    done = run_command("opreplay", tiny_trace, *FAST, "--store", tmp_path / "file")
    assert (done.returncode, "cannot be written" in done.stderr) == (2, True)


def test_parts_are_concatenated_and_repeats_are_merged(tmp_path: Path) -> None:
    whole = make_run(1, cases=4, repeats=1)
    parts = [Results(whole.rows[:2], HEADER), Results(whole.rows[2:], HEADER)]
    with pytest.raises(UserError, match="two of the files are the same run"):
        merge_runs([whole, make_run(1, cases=4, repeats=1)])
    with pytest.raises(UserError, match="do not contain the facts that identify what was timed"):
        merge_runs([replace(part, header={}) for part in parts])
    assert list(merge_runs(parts).rows) == list(whole.rows)
    other = make_run(2, cases=4, repeats=2)
    merged = merge_runs([whole, other])
    assert [row.repeats for row in merged] == [[20, 20, 20]] * 4
    for name, run in (("a", whole), ("b", other)):
        write_results(run.rows, run.header, tmp_path / f"{name}.json", force=False)
    done = run_command("opgrip", "results", "merge", "a.json", "b.json", "-o", "c.parquet", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "opgrip results merge: wrote 4 rows to c.parquet\n")
    assert list(Results.load(tmp_path / "c.parquet").rows) == list(merged.rows)


@pytest.mark.parametrize(
    "changed",
    [
        {"device": "NVIDIA L4"},
        {"trace_hash": "11"},
        {"environment": {"machine": "there"}},
        {"environment": {**HEADER["environment"], "threads": 4}},
    ],
)
def test_runs_of_different_machines_are_not_merged(changed: dict[str, object]) -> None:
    run = make_run(1, cases=2)
    with pytest.raises(UserError, match="the files differ in"):
        merge_runs([run, Results(run.rows, {**HEADER, **changed})])


def test_merged_repeats_have_equal_weight() -> None:
    few, many = make_row(0, [10.0, 10.0]), make_row(0, [20.0] * 98)
    (row,) = merge_runs([Results([few], HEADER), Results([many], HEADER)]).rows
    assert (row.p10_us, row.p90_us, row.mean_us) == (10.0, 20.0, pytest.approx(15.0))
    failed = replace(few, status="failed", error="why", times_us=None)
    (row,) = merge_runs([Results([few], HEADER), Results([failed], HEADER)]).rows
    assert row.status == "failed"


def test_cases_are_repeated_until_their_difference_is_decided() -> None:
    base = make_run(1, cases=40, repeats=5)
    asked: list[tuple[str, set[int]]] = []

    def run_once(numbers: Collection[int], which: str) -> dict[int, list[Result]]:
        asked.append((which, {*numbers}))
        again = make_run(10 + len(asked), cases=40, repeats=1, slower=1.2)
        return {number: [again.rows[number]] for number in numbers}

    first = {row.case: [row] for row in make_run(10, cases=40, repeats=1, slower=1.2)}
    joined = repeat(first, run_once, 2, base)
    assert asked[0] == ("repeat 2 of 2", {*range(40)})
    assert [which for which, _ in asked[1:]] == [f"repeat {time}" for time in range(3, len(asked) + 2)]
    # only undecided cases, which may change with the results of others
    assert len(asked) > 2
    assert all(len(numbers) < 20 for _, numbers in asked[1:])
    assert len(asked) < 20 or len(asked[-1][1]) < 20
    comparison = compare(base, Results([row for rows in joined.values() for row in rows], HEADER))
    slower = [pair.base.case for pair in comparison.pairs if pair.verdict is Verdict.SLOWER]
    # five repeats of the base may not decide one of the cases
    assert len({number for number in range(40) if 10 ** (3 * number / 40) > 50} - set(slower)) <= 1


def test_missing_base_of_until_decided_is_reported_before_anything_runs(tiny_trace: Path, tmp_path: Path) -> None:
    done = run_command("opreplay", tiny_trace, "--until-decided", tmp_path / "none.json")
    assert (done.returncode, "is neither a file nor a run in" in done.stderr) == (2, True)
    base = make_run(1, cases=2)
    write_results(base.rows, base.header, tmp_path / "base.json", force=False)
    done = succeed("opreplay", tiny_trace, *FAST, "--until-decided", tmp_path / "base.json")
    assert f"against {tmp_path / 'base.json'}: 0 cases timed in both: 2 missing, 3 new" in done.stderr
