"""Processes that cases run in, by fork where that is safe and quick, else anew."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import monotonic_ns
from typing import IO, Any, Protocol

from opgrip.cli.own_python import own_python
from opgrip.cli.progress import Tell, tell_nobody
from opgrip.errors import UserError
from opgrip.replay.results.results import FAILED, TIMEOUT
from opgrip.replay.timing.rounds import Announce
from opgrip.replay.workers.job import Job, Loaded
from opgrip.replay.workers.watch import NOTHING, Watch
from opgrip.replay.workers.worker import DEVICE_LOST, end_with_parent, limit_memory, serve

POLL_S = 0.1
WORKER = "opgrip.replay.workers.worker"
NOISE = ("USDT:",)
"""Beginnings of lines that torch's profiler prints on its own."""


class Process(Protocol):
    """A process that serves cases.

    Attributes
    ----------
    to, from_ : descriptors that it is told cases by, and tells rows by
    """

    to: int
    from_: int

    def let_end(self) -> None:
        """Tell it that nobody asks any more, upon which it ends by itself."""

    def wait(self) -> int:
        """Wait for its end; gives its exit status, or minus the signal that ended it."""

    def kill(self) -> None:
        """End it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended in the middle of its work.

    Attributes
    ----------
    case, row : what was at work
    status, reason : of a row that is to blame for it
    """

    case: int
    row: int
    status: str
    reason: str


@dataclass(frozen=True, slots=True)
class ForkLimits:
    """What a fork may take.

    Attributes
    ----------
    memory_bytes : beside what it begins with; None for all that there is
    timeout_s : of a call; None for as long as it takes
    """

    device: str
    memory_bytes: int | None
    timeout_s: float | None


def run_in_fork(
    run: Callable[[Announce, Tell], dict[str, Any]], limits: ForkLimits, tell: Tell = tell_nobody
) -> dict[str, Any] | Ended:
    """What a function gives in a fork of this process, which must not have used torch yet; or how the fork ended.

    Parameters
    ----------
    run : is given what it tells the number of each call before that runs, and what it tells how far it is
    tell : is told here how far it is

    Raises
    ------
    UserError : that the function raises
    """

    def fork(watch: Watch, errors: IO[bytes]) -> Process:
        def serve_once(_: int, output: int) -> None:
            limit_memory(limits.memory_bytes, limits.device)
            answer(lambda tell: run(watch.entered, tell), output)

        return _Forked(serve_once, errors)

    return _follow(fork, limits.timeout_s, tell)


def run_spawned(
    module: str, request: Mapping[str, Any], timeout_s: float | None, tell: Tell = tell_nobody
) -> dict[str, Any] | Ended:
    """The same of a module that is run as a program, which reads its request and says by `answer` what it gives.

    Parameters
    ----------
    request : its first line of input, with the descriptor of the `Watch` that it announces calls in besides
    """
    return _follow(lambda watch, errors: _Spawned(module, request, watch, errors), timeout_s, tell)


def _follow(
    begin: Callable[[Watch, IO[bytes]], Process], timeout_s: float | None, tell: Tell
) -> dict[str, Any] | Ended:
    """What a process gives in the end."""
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as file:
        watch = Watch(file.fileno())
        watch.mark_idle()
        process = begin(watch, errors)
        message: dict[str, Any] = {}
        is_late = False
        try:
            for line in _lines(process.from_):
                if line:
                    message = json.loads(line)
                if "progress" in message and line:
                    tell(*message["progress"])
                at = watch.read()
                since_s = (monotonic_ns() - at.since_ns) / 1e9
                is_late = timeout_s is not None and at.case != NOTHING and since_s > timeout_s
                if is_late:
                    process.kill()
                    break
        except BaseException:
            # Ctrl-C is not for it
            process.kill()
            process.wait()
            raise
        at, code, words = watch.read(), process.wait(), last_words(errors)
    if is_late:
        return Ended(at.case, at.row, TIMEOUT, f"it took longer than {timeout_s:g} s")
    if code or not message or "progress" in message:
        return Ended(at.case, at.row, FAILED, f"{how_it_ended(code)}{': ' if words else ''}{words}")
    if "problem" in message:
        raise UserError(*message["problem"])
    return message


def answer(run: Callable[[Tell], dict[str, Any]], output: int) -> None:
    """Say what a function gives, and meanwhile how far it is, or the user's mistake that it raises; then end."""
    with os.fdopen(output, "wb") as file:

        def say(message: dict[str, Any]) -> None:
            file.write(json.dumps(message).encode() + b"\n")
            file.flush()

        try:
            message = run(lambda *progress: say({"progress": progress}))
        except UserError as error:
            message = {"problem": [error.problem, error.hint]}
        say(message)
    os._exit(0)


def _lines(file: int) -> Iterator[bytes]:
    """What comes through a pipe, up to its end; an empty line where nothing comes for a while."""
    pieces: list[bytes] = []
    while True:
        if not select.select([file], [], [], POLL_S)[0]:
            yield b""
            continue
        chunk = os.read(file, 1 << 16)
        if not chunk:
            return
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            yield b"".join([*pieces, line])
            pieces.clear()
        pieces.append(rest)


def last_words(errors: IO[bytes]) -> str:
    """What a process wrote to stderr last, in one line; the file is empty afterwards."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").splitlines()
    errors.seek(0)
    errors.truncate()
    said = [line.strip() for line in lines if line.strip() and not line.startswith(NOISE)]
    return said[-1][:200] if said else ""


def how_it_ended(code: int) -> str:
    """An exit status, or minus the signal that ended a process, in words."""
    if code == DEVICE_LOST:
        return "it ended the use of the device"
    if code >= 0:
        return f"it ended its process with status {code}"
    name = signal.strsignal(-code) or f"signal {-code}"
    if -code == signal.SIGKILL:
        return "its process was killed, perhaps for want of memory"
    return f"it ended its process: {name.lower()}"


def start(job: Job, loaded: Loaded, watch: Watch, errors: IO[bytes], may_fork: bool) -> Process:
    """A process that serves a job's cases.

    Parameters
    ----------
    errors : takes what it writes to stderr
    may_fork : whether this process has not used torch yet: a fork waits for ever for threads that OpenMP has started
    """
    if may_fork and not loaded.source_cases.has_run_code and loaded.settings.device == "cpu":
        return _Forked(lambda to, from_: serve(loaded, watch, to, from_, job.plan.points.pin), errors)
    return _Spawned(WORKER, {"job": asdict(job)}, watch, errors)


class _Forked:
    """A fork of this process, which has the trace and torch already. It starts in some milliseconds."""

    def __init__(self, run: Callable[[int, int], None], errors: IO[bytes]) -> None:
        theirs, self.to = os.pipe()
        self.from_, ours = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self.to)
                os.close(self.from_)
                _settle(errors)
                run(theirs, ours)
            finally:
                os._exit(1)
        os.close(theirs)
        os.close(ours)

    def let_end(self) -> None:
        os.close(self.to)
        self.to = -1

    def wait(self) -> int:
        _, status = os.waitpid(self._pid, 0)
        if self.to >= 0:
            os.close(self.to)
        os.close(self.from_)
        return os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        _kill(self._pid)


class _Spawned:
    """A new process that loads the trace itself: a GPU serves no fork of a process that has used it."""

    def __init__(self, module: str, request: Mapping[str, Any], watch: Watch, errors: IO[bytes]) -> None:
        self._process = subprocess.Popen(
            own_python(module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=[watch.file],
            start_new_session=True,
            env=os.environ | {"KINETO_LOG_LEVEL": "99"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.to, self.from_ = self._process.stdin.fileno(), self._process.stdout.fileno()
        with suppress(BrokenPipeError):
            os.write(self.to, json.dumps({**request, "watch": watch.file, "parent": os.getpid()}).encode() + b"\n")

    def let_end(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        # which communicate would close again
        self._process.stdin = None

    def wait(self) -> int:
        self._process.communicate()
        return self._process.returncode

    def kill(self) -> None:
        _kill(self._process.pid)


def _kill(pid: int) -> None:
    """End a process with all that it has started, such as compilers."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        # it may not have become the first of its group yet
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _settle(errors: IO[bytes]) -> None:
    """Make a fork a process of its own: Ctrl-C is not for it, and it ends with the one that made it."""
    os.setsid()
    end_with_parent()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    # what extensions print is not for our output
    os.dup2(errors.fileno(), 1)
    os.dup2(errors.fileno(), 2)
