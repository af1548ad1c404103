"""Progress of commands, which is shown on a terminal and not in a pipe."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
from programs import program_path, run_command

from opgrip.cli.progress import LARGE_BYTES, Reporter


def on_terminal(*words: object, **variables: str) -> str:
    """Return the output of a command to stderr if that is a terminal."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "160", **variables}
    command = [program_path(str(words[0])), *map(str, words[1:])]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=env) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                chunk = os.read(ours, 4096)
            except OSError:
                break
            shown += chunk
        process.wait()
    os.close(ours)
    return shown.decode()


@pytest.mark.slow
def test_sequence_shows_progress_on_a_terminal_and_one_line_in_a_pipe(tiny_trace: Path) -> None:
    words = ("opreplay", tiny_trace, "--sequence", "--iterations", "3")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", on_terminal(*words, NO_COLOR="1"))
    assert re.search(r"calls in their order on cpu: timed runs .* 2/3", shown)
    done = run_command(*map(str, words))
    assert re.fullmatch(
        r"opreplay: replaying \d+ calls in their order on cpu\nopreplay: \d+ cases: \d+ ok\n", done.stderr
    )


@pytest.mark.slow
def test_replay_progress_shows_remaining_time_and_respects_no_color(tiny_trace: Path) -> None:
    shown = on_terminal("opreplay", tiny_trace, "--iterations", "1", NO_COLOR="1")
    assert re.search(r"replaying \d+ cases on cpu.*left", shown)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", shown)


def test_reading_is_announced_for_large_files_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    for size, notice in [(1, ""), (LARGE_BYTES, f"prog: reading {path}, {LARGE_BYTES / 1e6:.0f} MB\n")]:
        with path.open("wb") as file:
            file.truncate(size)
        with Reporter("prog").reading(path):
            pass
        assert capsys.readouterr().err == notice
