"""The file beside the results that keeps what an interrupted replay can go on with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from example_trace import write

from opgrip.replay.options import job_with
from opgrip.replay.workers.job import Job
from opgrip.replay.workers.journal import Journal
from opgrip.traces.errors import UserError


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return job_with(write(tmp_path / "t.jsonl"))


def linked(path: Path) -> None:
    path.symlink_to(path.parent / "precious")


@pytest.mark.parametrize("make", [linked, os.mkfifo, Path.mkdir])
@pytest.mark.parametrize("force", [False, True])
def test_a_journal_that_is_no_ordinary_file_is_neither_written_nor_waited_for(
    tmp_path: Path, job: Job, make: Callable[[Path], None], force: bool
) -> None:
    (tmp_path / "precious").write_text("precious")
    make(tmp_path / "r.json.journal")
    with pytest.raises(UserError, match=r"r\.json\.journal is no ordinary file: remove it"):
        Journal(tmp_path / "r.json", job, resume=False, force=force)
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_journal_whose_first_line_was_cut_begins_anew(tmp_path: Path, job: Job) -> None:
    path = tmp_path / "r.json.journal"
    path.write_text('{"trace"')
    journal = Journal(tmp_path / "r.json", job, resume=True, force=False)
    whole = path.read_text()
    with journal:
        assert whole.endswith("}\n")
    assert not path.exists()
