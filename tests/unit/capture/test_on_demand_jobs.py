"""Processes that record together, and the handling of their answers."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opgrip.capture.on_demand import client, jobs
from opgrip.capture.on_demand.client import RecordableProcess, find_processes
from opgrip.capture.on_demand.jobs import choose_ranks, record_together
from opgrip.capture.on_demand.protocol import ARMED, DONE, STOP
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError

LAUNCHER, JOB = 10, "a job"


def process(pid: int, parent: int, **about: Any) -> RecordableProcess:
    return RecordableProcess(pid, Path(f"{pid}-ab.sock"), {"name": "train", "parent": parent, **about})


def rank(pid: int, parent: int, number: int) -> RecordableProcess:
    return process(pid, parent, job=JOB, rank=number, world_size=2)


def listed(monkeypatch: pytest.MonkeyPatch, *items: RecordableProcess) -> None:
    for module in (client, jobs):
        monkeypatch.setattr(module, "processes", lambda: list(items))


def pids_asked(word: str, number: int | None = None) -> list[int]:
    return [item.pid for item in choose_ranks(find_processes(word), number, Reporter("test"))]


def test_child_processes_of_ranks_are_not_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = rank(11, LAUNCHER, 0), rank(12, LAUNCHER, 1)
    loaders = rank(13, 11, 0), rank(14, 12, 1), rank(15, 13, 0)
    listed(monkeypatch, process(LAUNCHER, 1, name="run"), *ranks, *loaders)
    assert pids_asked("train") == pids_asked("12") == [11, 12]
    assert pids_asked("train", 1) == [12]
    assert pids_asked("14") == [14]


def test_ranks_started_by_another_rank_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    listed(monkeypatch, rank(11, LAUNCHER, 0), rank(12, 11, 1))
    assert pids_asked("train") == [11, 12]
    # processes of another job, regardless of who started them
    listed(monkeypatch, process(11, 1), rank(12, 11, 0), rank(13, 11, 1))
    with pytest.raises(UserError, match="3 processes are called train"):
        pids_asked("train")


def test_process_name_means_the_process_that_started_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed(monkeypatch, process(11, 1), process(12, 11), process(13, 11))
    assert pids_asked("train") == [11]
    assert "which are not recorded: to record one, give its PID: 12, 13" in capsys.readouterr().err
    assert pids_asked("13") == [13]
    listed(monkeypatch, process(11, 1), process(12, 1))
    with pytest.raises(UserError, match="2 processes are called train"):
        pids_asked("train")


def test_rank_that_starts_after_the_others_stopped_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late, other = rank(11, LAUNCHER, 0), rank(12, LAUNCHER, 1)
    stopped: dict[int, threading.Event] = defaultdict(threading.Event)
    discarded = []

    def converse(item: RecordableProcess, do: str, **fields: Any) -> Iterator[dict[str, Any]]:
        if do == STOP:
            discarded.append((item.pid, fields["discard"]))
            yield {"answer": DONE, "stopped": True}
            stopped[item.pid].set()
            return
        if item is other:
            # it was still loading the recorder when it was asked to stop, and had no recording
            assert stopped[other.pid].wait(30)
            stopped[other.pid].clear()
        yield {"answer": ARMED, "position": 12 if item is late else 8}
        has_ended = stopped[item.pid].wait(5)
        yield {"answer": DONE, "file": None if has_ended else "left.jsonl"}

    monkeypatch.setattr(jobs, "converse", converse)
    assert record_together([late, other], {"begins_at": 10}, Reporter("test")) == []
    assert discarded == [(11, True), (12, True), (12, True)]
