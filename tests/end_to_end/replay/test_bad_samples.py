"""Gripped samples that crash, hang, exit or use too much memory: each fails in its own row, and the others are
measured.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from programs import run_command, run_python, succeed

from opgrip.replay import Results

pytestmark = pytest.mark.slow

FAST = ("--iterations", "1", "--warmup", "0", "--timeout", "2")

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


@pytest.fixture(scope="module")
def rows(folder: Path) -> pd.DataFrame:
    succeed("opreplay", "all", *FAST, "-o", "rows.json", cwd=folder)
    return Results.load(folder / "rows.json").frame.set_index("op")


@pytest.mark.parametrize("name", BAD)
def test_bad_sample_fails_in_its_row(rows: pd.DataFrame, name: str) -> None:
    *_, status, reason = BAD[name]
    row = rows.loc[name]
    assert row["status"] == status
    assert reason in row["error"]
    assert row["shapes"] == "float32[3] Scale [float32[3],float32[2]]"


def test_good_samples_are_measured_next_to_bad_ones(rows: pd.DataFrame) -> None:
    assert rows.index.is_unique
    assert set(rows.index) == {*BAD, "changes_folder", "fine", "forks", "hangs_at_exit"}
    # its forks use the processors too
    assert rows.loc["forks", "status"] in {"ok", "contended"}
    fine = rows.drop(index=[*BAD, "forks"])
    assert set(fine["status"]) == {"ok"}
    assert (fine["median_us"] > 0).all()


def test_listing_bad_samples_runs_none_of_their_code(folder: Path) -> None:
    done = succeed("opreplay", "all", "--list", cwd=folder)
    assert {*BAD, "fine"} <= set(done.stdout.split())


def test_bad_sample_fails_in_all_of_its_rows(folder: Path) -> None:
    options = ["--op", "crashes", "--op", "exits", "--op", "fine", "--mode", "jit", "--backward", "--strict"]
    done = run_command("opreplay", "all", *options, *FAST, "-o", "four.json", cwd=folder)
    assert done.returncode == 1, done.stderr
    rows = Results.load(folder / "four.json").frame
    assert rows.groupby("op").size().to_dict() == {"crashes": 4, "exits": 4, "fine": 4}
    assert set(rows[rows["op"] != "fine"]["status"]) == {"failed"}
    assert "ok" in set(rows[rows["op"] == "fine"]["status"])
