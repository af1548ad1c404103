"""Tests of the journal next to the results, from which an interrupted replay resumes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from example_trace import write
from made_runs import make_row
from programs import run_command, run_python

from opgrip.errors import UserError
from opgrip.replay import Results
from opgrip.replay.replay_options import request_with
from opgrip.replay.reports.cells import read_completed
from opgrip.replay.run.request import RunRequest, identity
from opgrip.replay.workers.journal import open_journal


@pytest.fixture
def job(tmp_path: Path) -> RunRequest:
    return request_with(write(tmp_path / "t.jsonl"))


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


def test_resume_refuses_rows_of_another_machine_kind(tmp_path: Path, job: RunRequest) -> None:
    with open_journal(tmp_path / "r.json", job, "A100", resume=False, force=False) as journal:
        journal.add([make_row(0, [1.0])])
    with open_journal(tmp_path / "r.json", job, "A100", resume=True, force=False) as journal:
        assert [rows[0].case for rows in journal.items] == [0]
    with pytest.raises(
        UserError, match=r"r\.json\.journal contains rows of a replay on another kind of machine: use the same"
    ):
        open_journal(tmp_path / "r.json", job, "H100", resume=True, force=False)


def test_resume_refuses_rows_of_another_torch(tmp_path: Path, job: RunRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json.journal"
    path.write_text(json.dumps({**identity(job), "machine_kind": "cpu"}) + "\n")
    monkeypatch.setattr(torch, "__version__", "1.0")
    with pytest.raises(
        UserError, match=r"r\.json\.journal contains rows of a replay with another version of torch: use the same"
    ):
        open_journal(tmp_path / "r.json", job, "cpu", resume=True, force=False)


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
