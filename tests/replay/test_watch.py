"""A supervisor sees where its worker is, whenever it looks."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from itertools import count
from time import monotonic_ns

import pytest

from opgrip.replay.workers.watch import NOTHING, At, Watch

SECOND_NS = 10**9


@pytest.fixture
def watch() -> Iterator[Watch]:
    with tempfile.TemporaryFile() as file:
        yield Watch(file.fileno())


def place(at: At) -> tuple[int, int]:
    return at.case, at.row


def test_a_worker_is_at_what_it_entered_last(watch: Watch) -> None:
    assert place(watch.read()) == (NOTHING, NOTHING)
    began = monotonic_ns()
    for case in range(100):
        watch.entered(case, 7)
        assert place(Watch(watch.file).read()) == (case, 7)
    assert began <= watch.read().since_ns <= monotonic_ns()
    watch.mark_idle()
    assert place(watch.read()) == (NOTHING, NOTHING)


def test_what_is_read_while_it_is_written_is_one_entry(watch: Watch) -> None:
    began = monotonic_ns()
    watch.entered(0, 0)
    worker = os.fork()
    if not worker:
        for case in count():
            watch.entered(case, 3 * case)
    try:
        last = watch.read()
        cases = set()
        while monotonic_ns() - began < SECOND_NS:
            at = watch.read()
            assert at.row == 3 * at.case
            assert last.since_ns <= at.since_ns <= monotonic_ns()
            assert last.case <= at.case
            cases.add(at.case)
            last = at
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    assert len(cases) > 1
    # whatever it was at when it was killed
    assert watch.read().row == 3 * watch.read().case >= last.row


def test_a_worker_that_spoils_the_memory_is_at_nothing(watch: Watch) -> None:
    watch.entered(3, 4)
    os.pwrite(watch.file, b"\x55" * os.fstat(watch.file).st_size, 0)
    assert place(watch.read()) == (NOTHING, NOTHING)
