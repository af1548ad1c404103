"""Samples under opreplay, and cases that crash, hang, exit or use too much memory: only these are lost."""

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from example_trace import write
from optional import optional
from programs import program_path, receive_ctrl_c, refusal, run_command, run_python, succeed, wait_for

from opgrip.replay import Results
from opgrip.replay.cases.sources.samples import sample_cases
from opgrip.replay.results.results import CONTENDED, FAILED, OK, TIMEOUT
from opgrip.samples import samples
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import EXTENSION, OPERATOR, Calls, End, Record, Scope, Signature

SEGFAULT, ABORT, HANG, EXIT, HUGE = (
    "faulthandler:_sigsegv",
    "posix:abort",
    "time:sleep",
    "posix:_exit",
    "aten.add.Tensor",
)
EXTENSIONS = ("faulthandler", "posix", "time")


def bad_trace(path: Path, goods: int = 3) -> Path:
    """Write a trace with one case of each kind of failure, each after `goods` cases that succeed."""
    vector = TensorSpec((1000,), (1,), torch.float32, "cpu")
    # read as one element, written out as 4 TB
    huge = TensorSpec((1 << 40,), (0,), torch.float32, "cpu")
    bad = [
        (EXTENSION, SEGFAULT, ()),
        (EXTENSION, ABORT, ()),
        (EXTENSION, HANG, (3600,)),
        (EXTENSION, EXIT, (3,)),
        (OPERATOR, HUGE, (huge, 1)),
    ]
    signatures: list[Record] = []
    for kind, op, args in bad:
        for _ in range(goods):
            number = len(signatures)
            scalar = 1.0 + number
            signatures.append(Signature(number, OPERATOR, "aten.mul.Tensor", (vector, scalar), {}, outputs=vector))
        signatures.append(Signature(len(signatures), kind, op, args, {}))
    numbers = list(range(len(signatures)))
    calls = Calls(0, numbers, [0] * len(numbers), [10 * n for n in numbers], [5] * len(numbers))
    records = [Scope(0, "", "", "forward"), *signatures, calls, End(len(numbers), len(numbers), 10 * len(numbers))]
    return write(path, records)


TRUSTED = [word for name in EXTENSIONS for word in ("--extension", name)]
FAST = ["--iterations", "3", "--warmup", "0"]


BAD_CASES = {
    SEGFAULT: ("failed", "it ended its process: segmentation fault"),
    ABORT: ("failed", "it ended its process: aborted"),
    EXIT: ("failed", "it ended its process with status 3"),
    HANG: ("timeout", "it took longer than 2 s"),
    HUGE: ("failed", "out of memory: "),
}


def test_bad_cases_report_their_reasons_next_to_good_ones(tmp_path: Path) -> None:
    options = [*TRUSTED, *FAST, "--timeout", "2", "-o", "results.json"]
    done = succeed("opreplay", bad_trace(tmp_path / "t.jsonl"), *options, cwd=tmp_path)
    assert "20 cases: 15 ok, 4 failed, 1 timeout" in done.stderr
    rows = Results.load(tmp_path / "results.json").frame
    for op, (status, message) in BAD_CASES.items():
        row = rows[rows["op"] == op].iloc[0]
        assert (row["status"], message in row["error"]) == (status, True), row["error"]
        assert pd.isna(row["median_us"])
    good = rows[rows["op"] == "aten.mul.Tensor"]
    assert len(good) == 15
    assert set(good["status"]) == {"ok"}
    assert (good["median_us"] > 0).all()


def test_case_above_the_memory_limit_is_not_tried(tmp_path: Path) -> None:
    path, output = bad_trace(tmp_path / "t.jsonl", goods=1), tmp_path / "results.json"
    options = ["--op", "aten.*", "--memory-limit", "1GB", "-o", output]
    assert run_command("opreplay", path, *FAST, *options).returncode == 0
    results = Results.load(output).frame
    assert results[results["op"] == HUGE].iloc[0]["status"] == "failed"
    assert set(results[results["op"] != HUGE]["status"]) == {"ok"}


def journal_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []


def interrupted(folder: Path, how: signal.Signals) -> Path:
    """End a replay when it hangs, after the first part of its cases, and return its journal."""
    trace = bad_trace(folder / "t.jsonl", goods=60)
    command = [program_path("opreplay"), trace, *TRUSTED, *FAST, "--timeout", "600", "-o", folder / "results.json"]
    with subprocess.Popen(
        command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=receive_ctrl_c
    ) as process:
        journal = folder / "results.json.journal"
        wait_for(lambda: len(journal_lines(journal)) > 100, process)
        process.send_signal(how)
        output, errors = process.communicate(timeout=300)
    assert len(journal_lines(journal)) > 100, errors
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert b"--resume" in errors
        assert b"aten.mul.Tensor" in output
    return journal


def test_rows_of_an_interrupted_replay_are_not_overwritten_by_mistake(tmp_path: Path) -> None:
    path = bad_trace(tmp_path / "t.jsonl", goods=1)
    (tmp_path / "results.json.journal").write_text('{"trace": "another", "options": {}}\n', encoding="utf-8")
    options = ["--op", "aten.mul*", *FAST, "-o", "results.json"]
    error = refusal("opreplay", path, *options, cwd=tmp_path)
    assert "contains the rows of an interrupted replay: continue with --resume, or start again with --force" in error
    assert "contains rows of a replay of another trace or with other options" in refusal(
        "opreplay", path, *options, "--resume", cwd=tmp_path
    )
    assert run_command("opreplay", path, *options, "--force", cwd=tmp_path).returncode == 0
    done = run_command("opreplay", path, *options, "--resume", cwd=tmp_path)
    assert "results.json is complete" in done.stderr


@pytest.mark.parametrize("suffix", [".json", ".csv"])
def test_rows_are_appended_to_a_file(tmp_path: Path, suffix: str) -> None:
    path, output = bad_trace(tmp_path / "t.jsonl", goods=1), tmp_path / f"results{suffix}"
    assert run_command("opreplay", path, "--op", "aten.mul*", "--stop", "2", *FAST, "-o", output).returncode == 0
    options = ["--op", "aten.mul*", "--start", "2", *FAST, "-o", output]
    assert run_command("opreplay", path, *options).returncode == 2
    assert run_command("opreplay", path, *options, "--append").returncode == 0
    whole = Results.load(output).frame
    assert len(whole) == 5
    assert whole["case"].is_unique
    assert set(whole["status"]) == {"ok"}


FAST_SAMPLES = ("--iterations", "1", "--warmup", "0", "--timeout", "2")

SCRIPT = """
import torch
from opgrip import grip

class Scale:
    def __init__(self, factor):
        self.factor = factor

@grip(to='all')
def fine(x, scale, pair=None):
    x.add_(1)
    return x * scale.factor

x = torch.ones(3)
fine(x, Scale(2.0), [x, torch.ones(2)])
"""

BODY = """
import os, sys, time, torch
class Scale:
    pass
{top}
def {name}(x, scale, pair=None):
    {body}
    return x * scale.factor
"""

CRASHES = ("failed", "it ended its process: aborted")
# name : text at module level, body of the function, status, reason
BAD = {
    "crashes": ("", "os.abort()", *CRASHES),
    "crashes_at_import": ("os.abort()", "pass", *CRASHES),
    "crashes_at_second_call": ("seen = []", "seen.append(1); len(seen) > 1 and os.abort()", *CRASHES),
    "exits": ("", "sys.exit(3)", "failed", "SystemExit: 3"),
    "exits_at_import": ("sys.exit('no')", "pass", "failed", "SystemExit: no"),
    "ends": ("", "os._exit(0)", "failed", "it ended its process with status 0"),
    "fills_memory": ("", "torch.ones(1 << 50)", "failed", "out of memory: "),
    "hangs": ("", "time.sleep(600)", "timeout", "it took longer than 2 s"),
    "hangs_at_import": ("time.sleep(600)", "pass", "timeout", "it took longer than 2 s"),
    "lacks_class": ("del Scale", "pass", "failed", "cannot be loaded"),
    "needs": ("import not_here", "pass", "unsupported", "it needs not_here, which is not installed"),
    "raises": ("", "raise ValueError('bad')", "failed", "ValueError: bad"),
    "raises_at_import": ("1 / 0", "pass", "failed", "raises_at_import cannot be loaded: ZeroDivisionError"),
    "crashes_with_its_inputs": ("Scale.__del__ = lambda self: os.abort()", "pass", *CRASHES),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with good samples, some with side effects, and one for each kind of failure."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "uses.py").write_text(SCRIPT)
    run_python("uses.py", cwd=folder, status=0)
    for name, (top, body, *_) in BAD.items():
        plant(folder / "all", name, top, body)
    plant(folder / "all", "changes_folder", "os.chdir('/')", "os.chdir('/')")
    plant(folder / "all", "forks", "", "os.fork()")
    plant(folder / "all", "hangs_at_exit", "import atexit; atexit.register(time.sleep, 600)", "pass")
    return folder


def plant(folder: Path, name: str, top: str, body: str) -> None:
    shutil.copytree(folder / "fine", folder / name)
    about = json.loads((folder / name / "sample.json").read_text())
    (folder / name / "sample.json").write_text(json.dumps(about | {"name": name, "entry": name, "file": "code.py"}))
    calls = (folder / name / "calls.jsonl").read_text()
    (folder / name / "calls.jsonl").write_text(calls.replace('"fine"', f'"{name}"'))
    (folder / name / "code.py").write_text(BODY.format(top=top, name=name, body=body))


@pytest.mark.slow
def test_bad_samples_are_listed_and_fail_in_their_rows_next_to_good_ones(folder: Path) -> None:
    succeed("opreplay", "all", *FAST_SAMPLES, "-o", "rows.json", cwd=folder)
    sample_rows = Results.load(folder / "rows.json").frame.set_index("op")
    for name, (*_, status, reason) in BAD.items():
        row = sample_rows.loc[name]
        assert (row["status"], reason in row["error"]) == (status, True), name
        assert row["shapes"] == "float32[3] Scale [float32[3],float32[2]]"
    assert sample_rows.index.is_unique
    assert set(sample_rows.index) == {*BAD, "changes_folder", "fine", "forks", "hangs_at_exit"}
    # its forks use the processors too
    assert sample_rows.loc["forks", "status"] in {"ok", "contended"}
    fine = sample_rows.drop(index=[*BAD, "forks"])
    assert set(fine["status"]) == {"ok"}
    assert (fine["median_us"] > 0).all()
    # a list runs none of their code
    assert {*BAD, "fine"} <= set(succeed("opreplay", "all", "--list", cwd=folder).stdout.split())


@pytest.mark.slow
def test_bad_sample_fails_in_all_of_its_rows(folder: Path) -> None:
    options = ["--op", "crashes", "--op", "exits", "--op", "fine", "--mode", "jit", "--backward", "--strict"]
    done = run_command("opreplay", "all", *options, *FAST_SAMPLES, "-o", "four.json", cwd=folder)
    assert done.returncode == 1, done.stderr
    sample_rows = Results.load(folder / "four.json").frame
    assert sample_rows.groupby("op").size().to_dict() == {"crashes": 4, "exits": 4, "fine": 4}
    assert set(sample_rows[sample_rows["op"] != "fine"]["status"]) == {"failed"}
    assert "ok" in set(sample_rows[sample_rows["op"] == "fine"]["status"])


FAST_STEP = ["--sequence", "--iterations", "1"]


def run_bad(trace: Path, output: Path, *options: str, status: int = 0) -> tuple[dict[str, str], dict[str, str]]:
    """Return, by operator, the reasons why calls did not run on flowing values, and the status of their rows."""
    done = run_command("opreplay", trace, *FAST_STEP, *options, "-o", output)
    assert done.returncode == status, done.stderr
    result: dict[str, Any] = json.loads(output.read_text())
    reasons = {row["op"]: f"{row['status']}: {row['reason']}" for row in result["sequence"]["not_replayed"]}
    for row in result["results"]:
        assert row["error"] is None or row["error"] in reasons[row["op"]]
    return reasons, {row["op"]: row["status"] for row in result["results"]}


@pytest.mark.slow
def test_bad_call_is_reported_and_not_run_again(tmp_path: Path) -> None:
    trusted = [word for name in EXTENSIONS for word in ("--extension", name)]
    reasons, statuses = run_bad(bad_trace(tmp_path / "t.jsonl"), tmp_path / "r.json", *trusted, "--timeout", "2")
    assert set(reasons) == {SEGFAULT, ABORT, EXIT, HANG, HUGE}
    assert "it ended its process: segmentation fault" in reasons[SEGFAULT]
    assert "it ended its process: aborted" in reasons[ABORT]
    assert "it ended its process with status 3" in reasons[EXIT]
    assert "it took longer than 2 s" in reasons[HANG]
    assert "unsupported: " in reasons[HUGE]
    assert statuses == {
        **dict.fromkeys([SEGFAULT, ABORT, EXIT, HUGE], FAILED),
        HANG: TIMEOUT,
        "aten.mul.Tensor": OK if statuses["aten.mul.Tensor"] == OK else CONTENDED,
    }


def test_call_with_larger_outputs_than_recorded_hits_the_memory_limit(tmp_path: Path) -> None:
    recorded = TensorSpec((2, 3), (3, 1), torch.float32, "cpu")
    signature = Signature(0, OPERATOR, "aten.ones.default", ([30_000, 30_000],), {}, outputs=recorded)
    records = [Scope(0, "", "", "forward"), signature, Calls(0, [0], [0], [10], [5]), End(1, 1, 10)]
    reasons, statuses = run_bad(
        write(tmp_path / "t.jsonl", records), tmp_path / "r.json", "--memory-limit", "1GB", status=1
    )
    assert reasons["aten.ones.default"] == "unsupported: out of memory: 3.6 GB were requested"
    assert statuses == {"aten.ones.default": FAILED}


ONCE = ("--iterations", "1", "--warmup", "0")


def rows_of(output: Path, *words: str, status: int = 0) -> pd.DataFrame:
    done = run_command("opreplay", *words, "-o", output)
    assert done.returncode == status, done.stderr
    return Results.load(output).frame


@pytest.mark.slow
def test_sample_runs_in_each_configuration(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "rows.json", "sample:bbox2delta", *ONCE, "--mode", "jit")
    assert len(rows) == 2 * len(samples()["bbox2delta"].configurations)
    assert set(rows["op"]) == {"bbox2delta"}
    assert set(rows["status"]) == {"ok"}
    assert set(rows["cache"]) == {"warm"}
    words = ("sample:bbox2delta", *ONCE, "--mode", "jit", "-o", tmp_path / "rows.json", "--resume")
    assert "is complete" in run_command("opreplay", *words).stderr


def test_jax_implementation_of_a_sample_is_a_mode(tmp_path: Path) -> None:
    optional("jax")
    rows = rows_of(tmp_path / "rows.json", "sample:bbox2delta", "--mode", "jax")
    assert rows[rows["mode"] == "jax"]["status"].tolist() == ["ok"] * 2


@pytest.fixture(scope="module")
def folder_of_samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gripped")
    text = (
        "import torch\nfrom opgrip import grip\n\n\n@grip(to='samples')\ndef nms(boxes):\n    return boxes.sin()\n\n\n"
    )
    (folder / "uses.py").write_text(f"{text}nms(torch.ones(3))\n")
    run_python("uses.py", cwd=folder, status=0)
    return folder


@pytest.mark.slow
def test_shipped_sample_has_a_name_that_no_folder_hides(folder_of_samples: Path) -> None:
    shipped = succeed("opreplay", "sample:nms", *ONCE, "-o", "shipped.json", cwd=folder_of_samples)
    assert "folder" not in shipped.stderr
    assert len(Results.load(folder_of_samples / "shipped.json")) == len(samples()["nms"].configurations)


@pytest.mark.slow
def test_folder_that_hides_a_shipped_sample_is_reported(folder_of_samples: Path) -> None:
    local = succeed("opreplay", "samples/nms", *ONCE, "-o", "local.json", cwd=folder_of_samples)
    notice = "opreplay: samples/nms is read as the local folder; the shipped sample of that name is sample:nms\n"
    assert notice in local.stderr
    assert len(Results.load(folder_of_samples / "local.json")) == 1


@pytest.mark.slow
def test_samples_means_shipped_samples_plus_those_of_the_folder(
    folder_of_samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder_of_samples)
    with pytest.warns(UserWarning, match="contains 1 sample, which run in addition"):
        cases = sample_cases("samples", ["nms"])
    assert len(cases) == len(samples()["nms"].configurations) + 1


def test_folder_with_an_ordinary_trace_is_refused_as_a_sample(tmp_path: Path, tiny_trace: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "code.py").write_text("def f(x):\n    return x\n", encoding="utf-8")
    about = {"name": "x", "entry": "f", "file": "code.py", "classes": {}, "source": {"module": "m", "qualname": "f"}}
    (folder / "sample.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / "calls.jsonl").write_bytes(tiny_trace.read_bytes())
    error = refusal("opreplay", "x", cwd=tmp_path, in_one_line=True)
    hint = "name a folder that opgrip grip wrote, or replay x/calls.jsonl as a trace"
    assert error == f"opreplay: error: x contains no sample with recorded calls: {hint}\n"
