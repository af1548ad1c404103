"""How a command shows on a terminal what it does."""

from __future__ import annotations

import io
from threading import Event, active_count

from rich.console import Console

from opgrip.traces.progress import Reporter


def on_terminal() -> tuple[Reporter, io.StringIO]:
    written = io.StringIO()
    reporter = Reporter("opcapture")
    reporter.console = Console(file=written, force_terminal=True, width=80)
    return reporter, written


def test_a_task_that_measures_nothing_shows_how_long_it_has_taken() -> None:
    reporter, written = on_terminal()
    with reporter.doing("building nets.py:small", measures=False):
        for _ in range(2000):
            if "0:00:01" in written.getvalue():
                break
            Event().wait(0.05)
    assert "building nets.py:small" in written.getvalue()
    assert "0:00:01" in written.getvalue()


def test_no_thread_draws_while_something_is_measured() -> None:
    reporter, _ = on_terminal()
    before = active_count()
    with reporter.doing("timing", 3):
        assert active_count() == before
