"""The command `opreplay`, run as a user runs it."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from example_trace import RECORDS, write
from made_runs import make_row
from programs import ROOT, SHIPPED_TRACES, refusal, run_command, succeed

from opgrip.replay import Results
from opgrip.replay.command.job import job_from_arguments, make_parser
from opgrip.replay.command.replay_kind import unfulfilled
from opgrip.replay.results.results import CONTENDED, FAILED, OK, SKIPPED, UNSUPPORTED, WRONG, Result
from opgrip.traces import load

FAST = ("--iterations", "1", "--warmup", "0")


def test_operators_and_modules_are_selected_by_patterns(detector_trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    chosen = ("--op", "aten.conv*", "--op", "aten.relu*", "--module", "backbone.*")
    assert run_command("opreplay", detector_trace, *FAST, *chosen, "-o", output).returncode == 0
    rows = Results.load(output).frame
    assert set(rows["op"]) == {"aten.convolution.default", "aten.relu_.default"}
    calls = load(detector_trace).calls
    inside = calls[calls["module"].str.startswith("backbone.") & calls["op"].isin(rows["op"])]
    assert rows["count"].sum() == len(inside)


def test_unsupported_case_affects_the_exit_status_only_with_strict(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl")
    done = succeed("opreplay", path)
    assert "skipped: it raised when it was captured: ValueError: no" in done.stdout
    assert run_command("opreplay", path, "--strict").returncode == 1


def test_cut_trace_is_replayed_only_with_partial(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", RECORDS[:-1])
    error = refusal("opreplay", path)
    assert error == f"opreplay: error: {path} is cut after record 16: load it with --partial\n"
    done = succeed("opreplay", path, "--partial")
    assert "is cut after record 16" in done.stderr


def test_missing_extension_is_reported(tmp_path: Path) -> None:
    done = run_command("opreplay", write(tmp_path / "t.jsonl"), "--list", "--extension", "nosuch.part")
    assert done.stderr == (
        "opreplay: --extension nosuch.part: no such module is installed, so its functions cannot run\n"
    )


def test_extension_is_imported_even_if_the_trace_calls_only_operators_of_torch(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text("open(__file__ + '.imported', 'w').close()")
    (tmp_path / "broken.py").write_text("1 / 0")
    words = ("opreplay", write(tmp_path / "t.jsonl"), "--iterations", 1, "--extension", tmp_path / "kernels.py")
    assert "1 ok" in succeed(*words).stderr
    assert (tmp_path / "kernels.py.imported").exists()
    done = run_command(*words, "--extension", tmp_path / "broken.py")
    assert "broken.py cannot be imported: ZeroDivisionError" in done.stdout


def tensor(shape: list[int], **rest: object) -> dict[str, object]:
    return {"tensor": {"shape": shape, "stride": [1] * len(shape), "dtype": "float32", "device": "cpu", **rest}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"args": [tensor([10**15])]}, "failed: out of memory: "),
        ({"args": [tensor([2**62, 2**62])]}, "unsupported: an argument needs more memory than a process can address"),
        ({"args": [tensor([3]), 1, 2]}, "failed: RuntimeError"),
        ({"args": [tensor([3], device="hpu:0")]}, "error: no HPU device here"),
        ({"op": "os.system.default", "args": ["true"]}, "unsupported: os.system.default is not registered"),
        ({"op": "aten.from_file.default", "args": ["/etc/passwd"]}, "unsupported: aten.from_file.default reads or"),
        ({"op": "aten.relu\udc80.default"}, "aten.relu\ufffd.default' is not an operator's name"),
        ({"kwargs": {"a": "\x1b[31mred"}}, "a=\\x1b[31mred"),
        ({"args": [float("nan")]}, "damaged after record 1"),
        ({"id": 5}, "error: the trace lacks the signatures of its calls"),
    ],
)
def test_untrusted_trace_causes_a_row_or_a_line_and_never_a_traceback(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    signature = {"type": "signature", "id": 0, "kind": "operator", "op": "aten.relu.default", "args": [tensor([3])]}
    calls = {"type": "calls", "thread": 0, "start_ns": 0, "signature": [0], "scope": [9], "after_ns": [0]}
    records = [
        {"type": "header", "format": "opgrip-trace", "version": "1.0"},
        signature | changes,
        calls | {"duration_ns": [5]},
        {"type": "end", "calls": 1, "signatures": 1, "duration_ns": 5, "dropped": []},
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    done = run_command("opreplay", path, *FAST)
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


LARGE = ("mmcv.*", "aten.addmm.*", "aten.index_put*")  # operators of the shipped traces that have no small calls


# the largest calls of the other operators take most of the time: only the exported scripts run them
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "part", [("--start", "80"), tuple(word for name in LARGE for word in ("--op", name))], ids=["small", "large"]
)
@pytest.mark.parametrize("path", SHIPPED_TRACES, ids=lambda path: path.name)
def test_shipped_traces_run_without_the_extensions(path: Path, part: tuple[str, ...], tmp_path: Path) -> None:
    # simulate a machine without mmcv by one that cannot be imported
    (tmp_path / "mmcv").mkdir()
    (tmp_path / "mmcv" / "__init__.py").write_text("raise ImportError('no mmcv here')", encoding="utf-8")
    output = tmp_path / "results.json"

    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    # with warm caches, no preceding calls are run
    done = run_command("opreplay", path, *FAST, "--cache", "warm", *part, "-o", output, cwd=ROOT, env=env)
    # nothing ran with --op 'mmcv.*'
    assert done.returncode == ("--op" in part), done.stderr
    rows = Results.load(output).frame
    extensions = rows["op"].str.startswith("mmcv.")
    assert extensions.any() == ("--op" in part)
    assert set(rows[extensions]["status"]) <= {"unsupported"}
    assert rows[extensions]["error"].str.contains("mmcv._ext is not installed").all()
    assert set(rows[~extensions]["status"]) == {"ok"}


def test_list_shows_the_cases_and_runs_none(tiny_trace: Path, tmp_path: Path) -> None:
    done = succeed("opreplay", tiny_trace, "--list", "--top", "3", cwd=tmp_path)
    assert "replaying" not in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert done.stdout.endswith("3 cases\n")
    signatures = {signature.number: signature.op for signature in load(tiny_trace).signatures}
    rows = [line.split() for line in done.stdout.splitlines() if "%" in line]
    assert len(rows) == 3
    assert all(signatures[int(row[0])] == row[3] for row in rows)


@pytest.mark.parametrize(
    "words", [["--exclude-op", "aten.a*"], ["--unit", "module", "--exclude-op", "features*"]], ids=["calls", "units"]
)
def test_exclude_op_removes_operators_and_units(tiny_trace: Path, words: list[str]) -> None:
    names = lambda *more: {  # noqa: E731
        line.split()[3]
        for line in run_command("opreplay", tiny_trace, "--list", *more).stdout.splitlines()
        if "%" in line
    }
    excluded = names(*words[:-2]) - names(*words)
    prefix = words[-1].rstrip("*")
    assert excluded
    assert all(name.startswith(prefix) for name in excluded)
    assert not any(name.startswith(prefix) for name in names(*words))


def test_trace_info_writes_tables_with_all_rows(tiny_trace: Path, tmp_path: Path) -> None:
    table = load(tiny_trace).summary()
    words = ("opgrip", "trace", "info", tiny_trace, "--top", "1")
    assert run_command(*map(str, words), "--by", "op", "-o", tmp_path / "t.csv").returncode == 0
    assert pd.read_csv(tmp_path / "t.csv")["op"].tolist() == table["op"].tolist()
    assert run_command(*map(str, words), "-o", tmp_path / "t.json").returncode == 0
    tables = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert [row["calls"] for row in tables["op"]] == table["calls"].tolist()
    assert set(tables) == {"op", "module"}
    error = refusal(*map(str, words), "-o", tmp_path / "u.csv")
    assert "u.csv can contain only one table, got op and module: choose one with --by" in error


RAN = make_row(1, [1.0], op="aten.add.Tensor", cache="program")
LACKING = replace(RAN, status=UNSUPPORTED, error="it cannot")


def lines_of(rows: list[Result], *words: str) -> list[str]:
    return unfulfilled(job_from_arguments(make_parser().parse_args(["trace.jsonl", *words])), rows)


@pytest.mark.parametrize(
    ("words", "other", "line"),
    [
        (["--backward"], replace(LACKING, direction="backward"), "nothing ran with --backward: it cannot"),
        (["--backward"], RAN, "nothing ran with --backward: no case is a forward call"),
        (["--mode", "eager,jit"], replace(LACKING, mode="jit"), "nothing ran with --mode jit: it cannot"),
        (["--dtype", "float64"], replace(LACKING, dtype="float64"), "nothing ran with --dtype float64: it cannot"),
        (["--threads", "2,4"], replace(RAN, threads=2), "nothing ran with --threads 4: no row has this value"),
        (["--batch-scale", "1,4"], replace(LACKING, batch_scale=4), "nothing ran with --batch-scale 4: it cannot"),
        (
            ["--values", "recorded,zeros"],
            replace(LACKING, values="zeros"),
            "nothing ran with --values zeros: it cannot",
        ),
        (
            ["--mode", "eager,tvm", "--tune", "4"],
            replace(RAN, mode="tvm"),
            "nothing ran with --tune: no row has this value",
        ),
        (["--energy"], RAN, "nothing ran with --energy: the energy of no row was measured"),
        (["--roofline"], RAN, "nothing ran with --roofline: it added nothing to any row"),
        (["--op", "aten.add*", "--op", "aten.mm"], RAN, "nothing ran with --op aten.mm: no case matches it"),
    ],
)
def test_request_that_no_row_fulfilled_is_reported_in_one_line(words: list[str], other: Result, line: str) -> None:
    assert lines_of([RAN, other], *words) == [line]


@pytest.mark.parametrize("status", [OK, WRONG, CONTENDED])
def test_request_is_fulfilled_by_a_row_that_ran(status: str) -> None:
    rows = [RAN, replace(LACKING, direction="backward"), replace(RAN, direction="backward", status=status)]
    assert not lines_of(
        rows, "--backward", "--mode", "eager", "--dtype", "float32", "--top", "1", "--op", "x", "--op", "y"
    )


def test_run_without_a_row_that_ran_is_reported_in_one_line() -> None:
    assert lines_of([LACKING, replace(LACKING, status=FAILED)], "--backward") == ["no case ran: it cannot"]
    assert lines_of([replace(LACKING, status=SKIPPED, error="it raised")]) == ["no case ran: it raised"]
    several = [LACKING, LACKING, replace(LACKING, error="it may not")]
    assert lines_of(several) == ["no case ran: it cannot (2 of 3 rows)"]


def test_exit_status_is_1_if_no_row_fulfilled_a_request(tmp_path: Path) -> None:
    text = "Operator: aten.argmax.default\ncnt: 1, ((T([2, 3], i64),), {})\n"
    (tmp_path / "inputs.txt").write_text(text, encoding="utf-8")
    words = ("opreplay", "inputs.txt", "--iterations", "2", "--warmup", "0")
    assert run_command(*words, cwd=tmp_path).returncode == 0
    done = run_command(*words, "--backward", cwd=tmp_path)
    assert done.returncode == 1
    assert "opreplay: nothing ran with --backward: not differentiable" in done.stderr
