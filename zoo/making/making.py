"""Makes one trace of the zoo, in processes of its own: a crash costs this trace, and nothing is left in memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from opgrip.errors import UserError, shortened
from opgrip.traces.zoo import ZooTrace
from opgrip.traces.zoo.files import MODELS, SUFFIX
from opgrip.zoo.making.packing import command_of, pack, recipe_command
from opgrip.zoo.making.recording import record_of

TIMEOUT_S = 1800.0
"""For a capture, and again for its step unwatched."""
OPCAPTURE = "import sys; from opgrip.capture.command.start import main; sys.exit(main())"
"""The command, whatever folder its script is in."""
LAST_WORDS = 300
"""Characters of what a process said last that are told of it."""


def is_current(trace: ZooTrace, folder: Path = MODELS) -> bool:
    """Whether the file of a trace is the one that its manifest describes, and was made by the recipe that it has."""
    file = folder / f"{trace.name}{SUFFIX}"
    if trace.recording is None or not file.is_file():
        return False
    if sha256(file.read_bytes()).hexdigest() != trace.recording.sha256:
        return False
    return command_of(file) == recipe_command(trace)


def make_trace(
    trace: ZooTrace, folder: Path = MODELS, timeout_s: float = TIMEOUT_S, times_step: bool = True
) -> ZooTrace:
    """Capture a trace anew into a folder; gives it with its recording.

    Parameters
    ----------
    timeout_s : after which a process is killed
    times_step : whether a process more times the step unwatched; it is 0 where not

    Raises
    ------
    UserError : where the capture fails, crashes or takes longer; the folder is as it was then
    """
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / f"{trace.name}.jsonl"
        _run(["-c", OPCAPTURE, *trace.arguments, "-o", str(plain), "--force"], trace, timeout_s)
        step_ms = _time_step(trace, timeout_s) if times_step else 0.0
        folder.mkdir(parents=True, exist_ok=True)
        packed = pack(plain, trace, folder / f"{trace.name}{SUFFIX}")
        return replace(trace, recording=record_of(packed, trace, step_ms))


def differences_anew(trace: ZooTrace, shipped: Path, timeout_s: float = TIMEOUT_S) -> list[str]:
    """Make a trace anew in a temporary folder: the signatures in which it differs from the one that ships, a line each.

    Signatures are the same whatever their times and values; so are those that are called as often.
    """
    from opgrip.traces import load
    from opgrip.traces.analysis.differences import compare_traces

    with tempfile.TemporaryDirectory() as scratch:
        make_trace(trace, Path(scratch), timeout_s, times_step=False)
        anew = load(Path(scratch) / shipped.name)
        difference = compare_traces(load(shipped), anew, ("shipped", "anew"))
    rows = [row for row in difference.rows if row.counts[0] != row.counts[1]]
    return [f"{row.counts[0]:,} -> {row.counts[1]:,} calls of {row.call}" for row in rows]


def _time_step(trace: ZooTrace, timeout_s: float) -> float:
    output = _run(["-m", "opgrip.zoo.making.step_time", *trace.arguments], trace, timeout_s)
    try:
        return round(float(json.loads(output.splitlines()[-1])["step_ms"]), 3)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise UserError(f"the step of {trace.name} cannot be timed", shortened(output[-LAST_WORDS:], 200)) from error


def _run(words: Sequence[str], trace: ZooTrace, timeout_s: float) -> str:
    """Run Python in a process group of its own; what it wrote to stdout."""
    environment = os.environ | {"OPGRIP_STORE": ""}
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    _offer_to_killer(process.pid)
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise UserError(f"{trace.name} took longer than {timeout_s:g} s") from error
        raise
    if process.returncode:
        raise UserError(f"{trace.name} cannot be made", _last_words(process.returncode, errors))
    return output


def _offer_to_killer(pid: int) -> None:
    """Where memory runs out, have the system end the model rather than what started it."""
    with suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("900")


def _last_words(status: int, errors: str) -> str:
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    lines = [line for line in errors.splitlines() if line.strip()] or [f"exit status {status}"]
    told = next((line for line in reversed(lines) if "error:" in line), lines[-1])
    return shortened(told.partition("error: ")[2] or told, LAST_WORDS)
