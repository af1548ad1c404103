"""Start and watch child processes that may crash, hang or use too much memory, and report their end."""

from __future__ import annotations

import ctypes
import errno
import glob
import json
import mmap
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from time import monotonic_ns
from types import TracebackType
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from opgrip.cli.command import own_python
from opgrip.errors import UserError

IDLE = -1  # value of `item` or `part` while the child does not work on one


@dataclass(frozen=True, slots=True)
class Beat:
    """The item, and the part of it, that a child process is working on.

    since_ns : time at which the child began to work on this item or part, by the monotonic clock
    """

    item: int
    part: int
    since_ns: int


class Heartbeat:
    """Shared memory in which a child process notes what it works on, for its parent."""

    _COUNT, _ENTRY = struct.Struct("q"), struct.Struct("qqqq")
    _ENTRIES = 16
    _SIZE = _COUNT.size + _ENTRIES * _ENTRY.size
    # one read is almost always enough; a child may write anywhere in its memory, and corrupt memory never has a valid
    # entry
    _MOST_READS = 10_000

    def __init__(self, file: int) -> None:
        is_new = os.fstat(file).st_size < self._SIZE
        if is_new:
            os.truncate(file, self._SIZE)
        self.file = file
        self._memory = mmap.mmap(file, self._SIZE)
        # struct clears its target first; storing one element of a view is a single write
        self._count = memoryview(self._memory).cast("q")[:1]
        if is_new:
            self.rest()

    def enter(self, item: int, part: int = IDLE) -> None:
        number, since_ns = self._count[0] + 1, monotonic_ns()
        check = hash((number, item, part, since_ns))
        self._ENTRY.pack_into(self._memory, self._offset(number), item, part, since_ns, check)
        self._count[0] = number

    def rest(self) -> None:
        self.enter(IDLE)

    def read(self) -> Beat:
        for _ in range(self._MOST_READS):
            number = self._count[0]
            item, part, since_ns, check = self._ENTRY.unpack_from(self._memory, self._offset(number))
            if check == hash((number, item, part, since_ns)):
                return Beat(item, part, since_ns)
        return Beat(IDLE, IDLE, monotonic_ns())

    def _offset(self, number: int) -> int:
        return self._COUNT.size + number % self._ENTRIES * self._ENTRY.size


POLL_S = 0.1  # default time in seconds that `receive` waits for a message
FAILED, TIMEOUT = "failed", "timeout"
DEVICE_LOST = 75  # exit status of a process that can no longer use its device
NOISE = ("USDT:",)  # beginnings of lines on stderr that torch's profiler prints and that do not explain an error
LONGEST_WORDS = 200
MOST_PRINTED = 100_000  # maximum number of bytes that are read from the stdout and stderr of a child
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Ended:
    """Why a child ended, and the item that it worked on last.

    status : `failed`, or `timeout` if it was killed because an item or part took too long
    """

    item: int
    part: int
    status: str
    reason: str


class Child:
    """A child process that exchanges JSON lines with this process; it starts when it is used.

    run : a function to call in a forked process, or the name of a module to run in a new Python process
    timeout_s : seconds that the child may work on an item, or a part of it, before it is killed; None for no limit
    confined : for a module, the folders that it may write to in bubblewrap; None to run it without bubblewrap
    """

    def __init__(
        self,
        run: Callable[[int, int, Heartbeat], object] | str,
        request: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        confined: Sequence[str] | None = None,
        shared: Sequence[int] = (),
    ) -> None:
        self._run, self._request, self._confined, self._shared = run, request, confined, shared
        self._timeout_s = timeout_s
        self._from = -1

    @property
    def is_running(self) -> bool:
        return self._from >= 0

    def start(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._beats = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes both
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._heartbeat = Heartbeat(self._beats.fileno())
        self._is_late, self._buffer = False, b""
        self._status: int | None = None
        theirs, self._to = os.pipe()
        self._from, ours = os.pipe()
        try:
            self.pid = self._spawn(self._run, theirs, ours) if isinstance(self._run, str) else os.fork()
            if not isinstance(self._run, str) and not self.pid:
                try:
                    self._settle()
                    self._run(theirs, ours, self._heartbeat)
                finally:
                    os._exit(1)
        except BaseException:
            os.close(self._from)
            self._from = -1
            self._close_input()
            raise
        finally:
            os.close(theirs)
            os.close(ours)
        if isinstance(self._run, str):
            self.send({**(self._request or {}), "heartbeat": self._heartbeat.file, "parent": os.getpid()})

    def _settle(self) -> None:
        os.close(self._to)
        os.close(self._from)
        # Ctrl-C is for the parent only
        os.setsid()
        end_with_parent()
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        # keep output of extensions out of the parent's output
        os.dup2(self._errors.fileno(), 1)
        os.dup2(self._errors.fileno(), 2)

    def _spawn(self, module: str, source: int, output: int) -> int:
        command, passed = own_python(module), [*self._shared]
        with ExitStack() as stack:
            if self._confined is not None:
                self._folder = tempfile.TemporaryDirectory(prefix="opgrip-sandbox-", ignore_cleanup_errors=True)
                caches = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR")
                own = [f"{name}={self._folder.name}" for name in caches]
                limits = bubblewrap([*self._confined, self._folder.name], list(_texts_in(self._request)))
                prefix, of_filter = stack.enter_context(limits)
                command, passed = [*prefix, "env", *own, *command], [*passed, *of_filter]
            process = subprocess.Popen(
                command,
                stdin=source,
                stdout=output,
                stderr=self._errors,
                pass_fds=[self._heartbeat.file, *passed],
                start_new_session=True,
                env=os.environ | {"KINETO_LOG_LEVEL": "99"},
            )
        # `_wait` collects it
        process.returncode = 0
        return process.pid

    def fileno(self) -> int:
        return self._from

    def send(self, message: Mapping[str, Any]) -> None:
        if not self.is_running:
            self.start()
        text = json.dumps(message).encode() + b"\n"
        with suppress(BrokenPipeError):
            while text:
                text = text[os.write(self._to, text) :]

    def receive(self, wait_s: float = POLL_S) -> list[Any] | Ended:
        """Wait at most `wait_s` seconds, and return the messages that arrived, or an `Ended` if the child has ended."""
        if not self.is_running:
            self.start()
        if not select.select([self._from], [], [], wait_s)[0]:
            self._end_if_late()
            return []
        chunk = os.read(self._from, 1 << 16)
        if not chunk:
            return self._ended()
        *lines, rest = chunk.split(b"\n")
        if not lines:
            self._buffer += rest
            return []
        lines[0], self._buffer = self._buffer + lines[0], rest
        return [json.loads(line) for line in lines]

    def result(self, report: Callable[..., object] = lambda *progress: None) -> dict[str, Any] | Ended:
        """Return the result that the child sends by `answer`, or an `Ended`; raise the `UserError` that it sends."""
        answer: dict[str, Any] | None = None
        while not isinstance(received := self.receive(), Ended):
            for message in received:
                if "progress" in message:
                    report(*message["progress"])
                else:
                    answer = message
            # check this also while the child keeps reporting progress
            self._end_if_late()
        if answer is None or self._is_late or self._status:
            return received
        if "problem" in answer:
            raise UserError(*answer["problem"])
        return answer

    def printed_lines(self) -> list[str]:
        text = os.pread(self._errors.fileno(), MOST_PRINTED, 0).decode(errors="replace")
        return list(dict.fromkeys(line for line in map(str.rstrip, text.splitlines()) if line))

    def finish(self) -> None:
        """Close the pipe to the child, and wait until the child exits."""
        self._close_input()
        self._wait()

    def kill(self) -> None:
        if self._status is None:
            kill_group(self.pid)

    def close(self) -> None:
        if not self.is_running:
            return
        self.kill()
        self._wait()
        self._close_input()
        for file in (self._beats, self._errors):
            file.close()
        os.close(self._from)
        self._from = -1
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _close_input(self) -> None:
        if self._to >= 0:
            os.close(self._to)
            self._to = -1

    def _wait(self) -> int:
        if self._status is None:
            _, status = os.waitpid(self.pid, 0)
            self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def _end_if_late(self) -> None:
        beat = self._heartbeat.read()
        if self._timeout_s is None or beat.item == IDLE or self._is_late:
            return
        if monotonic_ns() - beat.since_ns > self._timeout_s * 1e9:
            self._is_late = True
            self.kill()

    def _ended(self) -> Ended:
        beat, status, words = self._heartbeat.read(), self._wait(), last_words(self._errors)
        if self._is_late:
            return Ended(beat.item, beat.part, TIMEOUT, f"it took longer than {self._timeout_s:g} s")
        return Ended(beat.item, beat.part, FAILED, f"{how_it_ended(status)}{': ' if words else ''}{words}")


def receive_request() -> tuple[dict[str, Any], Heartbeat, int]:
    """Return, in a module run by a `Child`, the request, the child's heartbeat, and a descriptor for messages."""
    # output of extensions must not come between messages
    output = os.dup(1)
    os.dup2(2, 1)
    line = b""
    # read no further byte, because another reader reads the rest
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    request: dict[str, Any] = json.loads(line)
    if os.getppid() == request.pop("parent"):
        # otherwise the parent is a profiler or bubblewrap, which ends this process itself
        end_with_parent()
    return request, Heartbeat(request.pop("heartbeat")), output


def write_message(output: int, message: Any) -> None:
    text = json.dumps(message).encode() + b"\n"
    while text:
        text = text[os.write(output, text) :]


def answer(run: Callable[[Callable[..., None]], dict[str, Any]], output: int) -> None:
    """Call a function in a child process, send its result or its `UserError` to the parent process, and exit.

    run : called with a function that sends its arguments as a progress report
    """
    try:
        message = run(lambda *progress: write_message(output, {"progress": progress}))
    except UserError as error:
        message = {"problem": [error.problem, error.hint]}
    write_message(output, message)
    os._exit(0)


def end_with_parent() -> None:
    """Ask the system to kill this process when the thread that started it ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        # it may not lead the group yet
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def last_words(errors: IO[bytes]) -> str:
    """Return the last meaningful line of a file, and empty the file."""
    errors.seek(0)
    lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines()]
    errors.seek(0)
    errors.truncate()
    return next((line for line in reversed(lines) if line and not line.startswith(NOISE)), "")[:LONGEST_WORDS]


def how_it_ended(status: int) -> str:
    """Return a clause such as `it ended its process with status 1`; `status` is negative for a signal."""
    if status == DEVICE_LOST:
        return "it made the device unusable"
    if status >= 0:
        return f"it ended its process with status {status}"
    if -status == signal.SIGKILL:
        return "its process was killed, perhaps for lack of memory"
    return f"it ended its process: {(signal.strsignal(-status) or f'signal {-status}').lower()}"


@dataclass(frozen=True, slots=True)
class Finished:
    """Outcome of a program that was run.

    status : exit status; minus the number of the signal that ended the program; None if it was killed after `timeout_s`
    """

    status: int | None
    output: str
    errors: str


def run_program(
    command: Sequence[str],
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    log: IO[bytes] | None = None,
    started: Callable[[int], None] = lambda pid: None,
    pass_fds: Sequence[int] = (),
) -> Finished:
    """Run a command in a new process group until it ends, then kill the processes that it left running.

    log : file to which the command's stdout and stderr are written; None to return them
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if log is None else log,
        stderr=subprocess.PIPE if log is None else subprocess.STDOUT,
        env=env,
        pass_fds=pass_fds,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    started(process.pid)
    status: int | None = None
    try:
        output, errors = process.communicate(timeout=timeout_s)
        status = process.returncode
    except subprocess.TimeoutExpired:
        kill_group(process.pid)
        output, errors = process.communicate()
    finally:
        # its own children may still run
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Finished(status, output or "", errors or "")


BWRAP = "bwrap"
NOBODY = "65534"  # user and group in the sandbox
HIDDEN = ("/tmp", "/var/tmp", "/run")  # folders with sockets and files of other programs
ACCELERATORS = ("nvidia*", "dri", "kfd", "dxg", "accel*")  # names in /dev
# by machine: its number in audits, the numbers of sendto, clone and unshare, and of those that the filter
# refuses: connect, sendmsg, sendmmsg (to reach sockets of the host), io_uring_setup, add_key, request_key, keyctl,
# setns, bpf, perf_event_open and userfaultfd
CALLS = {
    "x86_64": (0xC000003E, (44, 56, 272), (42, 46, 307, 425, 248, 249, 250, 308, 321, 298, 323)),
    "aarch64": (0xC00000B7, (206, 220, 97), (203, 211, 269, 425, 217, 218, 219, 268, 280, 241, 282)),
}
CLONE3, CLONE_NEWUSER = 435, 0x10000000


def _filter_of_calls(machine: str) -> bytes:
    load, jump_if_equal, jump_if_above, jump_if_set, end = 0x20, 0x15, 0x35, 0x45, 0x06
    audit, (sendto, clone, unshare), refused = CALLS[machine]
    number, first_argument, address = (load, 0, 0, 0), (load, 0, 0, 16), 48
    refuse, unknown = (end, 0, 0, 0x50000 | errno.EPERM), (end, 0, 0, 0x50000 | errno.ENOSYS)
    steps = [(load, 0, 0, 4), (jump_if_equal, 1, 0, audit), refuse]
    # the calls of x86's 32-bit pointers
    steps += [number, (jump_if_above, 0, 1, 1 << 30), refuse]
    for call in refused:
        steps += [(jump_if_equal, 0, 1, call), refuse]
    # its flags are in memory, which a filter cannot read; the C library uses clone instead
    steps += [(jump_if_equal, 0, 1, CLONE3), unknown]
    for call in (clone, unshare):
        steps += [(jump_if_equal, 0, 4, call), first_argument, (jump_if_set, 0, 1, CLONE_NEWUSER), refuse, number]
    # `sendto` is also `send`, without an address
    steps += [(jump_if_equal, 0, 5, sendto), (load, 0, 0, address), (jump_if_equal, 0, 2, 0)]
    steps += [(load, 0, 0, address + 4), (jump_if_equal, 1, 0, 0), refuse, (end, 0, 0, 0x7FFF0000)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(part)


@contextmanager
def bubblewrap(writable: Sequence[str], readable: Sequence[str] = ()) -> Iterator[tuple[list[str], list[int]]]:
    """Yield words to put before a command to confine it, and the files that the command must inherit.

    writable : folders that the command may write to
    readable : files and folders that it can read even if they are in a folder that is hidden otherwise
    """
    hidden = list(dict.fromkeys(folder for folder in map(os.path.realpath, HIDDEN) if os.path.isdir(folder)))
    shown = [os.getcwd(), *_editable(), sys.prefix, sys.base_prefix, *sys.path, *readable]
    mounts = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    mounts += [word for folder in hidden for word in ("--tmpfs", folder)]
    mounts += [word for path in _visible(shown, hidden) for word in ("--ro-bind", path, path)]
    nodes = sorted(node for name in ACCELERATORS for node in glob.glob(f"/dev/{name}"))
    mounts += [word for node in nodes for word in ("--dev-bind", node, node)]
    mounts += [word for folder in writable for word in ("--bind", folder, folder)]
    limits = ["--unshare-all", "--unshare-user", "--uid", NOBODY, "--gid", NOBODY, "--cap-drop", "ALL"]
    with tempfile.TemporaryFile() as file:
        if (machine := os.uname().machine) in CALLS:
            file.write(_filter_of_calls(machine))
            file.seek(0)
            limits += ["--seccomp", str(file.fileno())]
        yield [BWRAP, *limits, "--die-with-parent", *mounts, "--"], [file.fileno()]


def _editable() -> list[str]:
    # packages that `pip install -e` installed, which may not be in `sys.path`
    origins = [json.loads(found.read_text("direct_url.json") or "{}") for found in distributions()]
    return [unquote(urlsplit(origin["url"]).path) for origin in origins if "editable" in origin.get("dir_info", {})]


def _visible(paths: Sequence[str], hidden: Sequence[str]) -> dict[str, None]:
    below = tuple(f"{folder}/" for folder in hidden)
    visible: dict[str, None] = {}
    for path in paths:
        for place in filter(os.path.exists, (os.path.abspath(path), os.path.realpath(path))):
            folder, name = os.path.split(place)
            if folder in hidden and not os.path.isdir(place):
                stem = os.path.join(folder, name[:1] + name[1:].partition(".")[0])
                visible |= dict.fromkeys([place, *glob.glob(f"{glob.escape(stem)}.*")])
            elif place.startswith(below):
                visible[place if os.path.isdir(place) else folder] = None
    return visible


def check_bubblewrap() -> None:
    if shutil.which(BWRAP) is None:
        raise UserError("--sandbox needs bubblewrap (bwrap), which is not installed", "apt install bubblewrap")
    with bubblewrap(()) as (words, files):
        finished = run_program([*words, "true"], pass_fds=files)
    if finished.status:
        words = (finished.errors.strip().splitlines() or [f"exit status {finished.status}"])[-1:]
        raise UserError(f"bwrap cannot confine processes here: {words[0]}", "allow user namespaces, or use a container")
