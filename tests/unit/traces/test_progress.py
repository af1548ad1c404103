"""Progress of a command on a terminal."""

from __future__ import annotations

import io
import re
import threading
import warnings
from threading import Event

import pytest
from rich.console import Console

from opgrip.cli.progress import QuietReporter, Reporter


def on_terminal(width: int = 80) -> tuple[Reporter, io.StringIO]:
    written = io.StringIO()
    reporter = Reporter("opcapture")
    reporter.console = Console(file=written, force_terminal=True, width=width)
    return reporter, written


def test_unmeasured_task_shows_its_elapsed_time() -> None:
    reporter, written = on_terminal()
    with reporter.doing("building nets.py:small", measures=False):
        for _ in range(2000):
            if "0:00:01" in written.getvalue():
                break
            Event().wait(0.05)
    assert "building nets.py:small" in written.getvalue()
    assert "0:00:01" in written.getvalue()


def test_progress_uses_no_thread_while_something_is_measured() -> None:
    reporter, _ = on_terminal()
    # threads of other tests may end meanwhile
    before = set(threading.enumerate())
    with reporter.doing("timing", 3):
        assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("width", [20, 40, 60, 80, 160])
def test_narrow_terminal_shows_no_bar_and_whole_numbers(width: int) -> None:
    reporter, written = on_terminal(width)
    with reporter.doing("replaying 1234 cases on cuda:0", 1234) as advance:
        for _ in range(1234):
            advance()
    with reporter.following("replaying 5678 calls in their order") as on_progress:
        on_progress("timed runs", 123, 456)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= width
    assert any("1234/1234" in line for line in lines)
    assert any("123/456" in line and re.search(r"\d:\d\d:\d\d", line) for line in lines)
    assert not any("…" in line for line in lines)
    assert ("━" in written.getvalue()) == (width >= 80)
    assert any(line.startswith("replaying") for line in lines) == (width >= 40)


def test_jupyter_without_widgets_shows_nothing_and_does_not_warn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("opgrip.cli.progress.has_widgets", lambda: False)
    reporter = QuietReporter("opgrip")
    written = io.StringIO()
    reporter.console = Console(file=written, force_jupyter=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with reporter.doing("replaying", 3) as advance:
            advance()
        with reporter.following("replaying") as on_progress:
            on_progress("timed runs", 1, 2)
    assert written.getvalue() == ""
