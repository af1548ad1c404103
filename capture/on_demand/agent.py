"""The agent: a thread in the recorded process that waits for requests to record."""

from __future__ import annotations

import atexit
import errno
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import count
from math import inf
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from opgrip.capture.on_demand.protocol import (
    ABOUT,
    ARMED,
    DONE,
    RECORD,
    REFUSED,
    STOP,
    TELL,
    WAITING,
    MessageSocket,
    OwnSocket,
    RecordingRequest,
    check_request,
    lines_of,
    make_folder,
    may_ask,
    request_of,
    socket_path,
)
from opgrip.capture.on_demand.settings import AgentSettings, default_settings
from opgrip.capture.program.processes import rank
from opgrip.errors import UserError, one_line, raise_if_from_program
from opgrip.platform import monotonic, perf_counter_ns, sleep

if TYPE_CHECKING:
    from opgrip.capture.on_demand.session import RecordingSession


MOST_CONNECTIONS = 8  # maximum number of simultaneous clients; more are disconnected
REQUEST_S = 2.0  # time in seconds within which a complete request must arrive
MOST_FAILURES = 100  # maximum number of distinct failures that are counted
END_S = 10.0  # time in seconds for writing a recording when the program ends
PAUSE_S = 0.1  # pause in seconds before another attempt, for example after the system ran out of file descriptors


class Agent:
    """Answers requests to record this process, which arrive over a socket."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self.failures: Counter[str] = Counter()
        self.recordings = 0
        self._pid = os.getpid()
        self._started_s = time.time()
        self._session: RecordingSession | None = None
        self._free = threading.Lock()
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._is_closed = False
        self.path = socket_path(make_folder())
        self._listen()

    def _listen(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # clients remove sockets without a listener, so name the socket only once it listens
            hidden = self.path.with_suffix(".new")
            listener.bind(str(hidden))
            hidden.chmod(0o600)
            listener.listen(MOST_CONNECTIONS)
            hidden.rename(self.path)
        except OSError:
            listener.close()
            raise
        self._listener = OwnSocket(listener)

    @property
    def is_recording(self) -> bool:
        return self._session is not None

    def start(self) -> None:
        threading.Thread(target=self._serve, name="opgrip-agent", daemon=True).start()

    def record(
        self,
        request: RecordingRequest,
        armed: Callable[[RecordingSession], None] = lambda session: None,
        waiting: Callable[[str], None] = lambda why: None,
    ) -> dict[str, Any]:
        """Record steps as requested; return the trace's `file` and the numbers of `steps` and `calls`."""
        asked_ns = perf_counter_ns()
        _wait_for_torch(request.wait_s)
        session = self.begin(request, asked_ns)
        try:
            armed(session)
        except BaseException:
            session.stop(grace_s=0.0)
            self.finish(session)
            raise
        return self.finish(session, waiting)

    def begin(self, request: RecordingRequest, asked_ns: int) -> RecordingSession:
        from opgrip.capture.on_demand.session import RecordingSession

        if not self._free.acquire(blocking=False):
            raise UserError(
                f"process {self._pid} is recording already", f"end that recording with opcapture stop {self._pid}"
            )
        try:
            self._session = RecordingSession(self.settings, request, self.recordings + 1, asked_ns)
            self._session.begin()
            return self._session
        except BaseException:
            self._session = None
            self._free.release()
            raise

    def finish(self, session: RecordingSession, waiting: Callable[[str], None] = lambda why: None) -> dict[str, Any]:
        try:
            result = session.finish(waiting)
            self.recordings += bool(result["file"])
            return result
        finally:
            self._session = None
            self._free.release()

    def stop(self) -> bool:
        session = self._session
        if session is not None:
            session.stop()
        return session is not None

    def about(self) -> dict[str, Any]:
        torch = sys.modules.get("torch")
        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "host": socket.gethostname(),
            "command": " ".join(sys.orig_argv)[:1000],
            "python": platform.python_version(),
            "torch": None if torch is None else str(torch.__version__),
            "rank": rank(),
            "name": self.settings.name,
            "recordings": self.recordings,
            "recording": self.is_recording,
            "agent_started_unix": self._started_s,
            "failures": dict(self.failures),
        }

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        self._is_closed = True
        with suppress(OSError):
            self.path.unlink()
        with suppress(OSError):
            # wakes the listening thread
            self._listener.link.shutdown(socket.SHUT_RDWR)
        session = self._session
        if session is not None:
            session.stop(grace_s=0.0)
            if self._free.acquire(timeout=END_S):
                self._free.release()

    def abandon(self) -> None:
        if self._session is not None:
            self._session.abandon()
        self._listener.link.close()

    def _serve(self) -> None:
        while True:
            try:
                if self._listener.link.fileno() < 0 and not self._is_closed:
                    self._listen()
                link, _ = self._listener.link.accept()
            except OSError as error:
                if self._is_closed or error.errno == errno.EINVAL:
                    self._listener.link.close()
                    return
                # for example too many open files, some of which the program may close
                self._fail(error)
                sleep(PAUSE_S)
                continue
            if not self._room.acquire(blocking=False):
                link.close()
                continue
            try:
                threading.Thread(target=self._answer, args=(link,), name="opgrip-request", daemon=True).start()
            except Exception as error:
                self._room.release()
                self._fail(error)
                link.close()

    def _answer(self, link: socket.socket) -> None:
        client = MessageSocket(link)
        try:
            if may_ask(link):
                self._do(client)
        except Exception as error:
            self._fail(error)
            with suppress(OSError):
                client.send({"answer": REFUSED, "why": _in_a_line(error)})
        finally:
            with suppress(OSError):
                # a process forked in the meantime keeps the connection open
                client.link.shutdown(socket.SHUT_RDWR)
            client.close()
            self._room.release()

    def _do(self, client: MessageSocket) -> None:
        message = client.receive(REQUEST_S)
        if message is None:
            return
        word = check_request(message)

        def answer(answer: str, fields: Mapping[str, Any]) -> None:
            # the client may have disconnected
            with suppress(OSError):
                client.send({"answer": answer, **fields})

        if word == TELL:
            answer(ABOUT, self.about())
        elif word == STOP:
            answer(DONE, {"stopped": self.stop()})
        elif word == RECORD:
            request = request_of(message)
            answer(DONE, self._record_for(client, request, answer))

    def _record_for(
        self, client: MessageSocket, request: RecordingRequest, answer: Callable[[str, Mapping[str, Any]], None]
    ) -> dict[str, Any]:
        over = threading.Event()

        def armed(session: RecordingSession) -> None:
            answer(ARMED, {"file": str(session.path)})
            watch = threading.Thread(
                target=_stop_when_left, args=(session, client, over), name="opgrip-link", daemon=True
            )
            # if no thread can be started for this, the recording ends by its own limits
            with suppress(RuntimeError):
                watch.start()

        try:
            return self.record(request, armed, lambda why: answer(WAITING, {"why": why}))
        finally:
            over.set()
            with suppress(OSError):
                # wakes the watching thread
                client.link.shutdown(socket.SHUT_RD)

    def _fail(self, error: Exception) -> None:
        # mistakes of clients do not count as failures
        if not isinstance(error, UserError) and len(self.failures) < MOST_FAILURES:
            self.failures[_in_a_line(error)] += 1


def _wait_for_torch(most_s: float) -> None:
    until_s = monotonic() + most_s
    while (torch := sys.modules.get("torch")) is None or getattr(torch.__spec__, "_initializing", False):
        if monotonic() >= until_s:
            raise UserError(f"process {os.getpid()} has not loaded torch yet", "try again later")
        sleep(PAUSE_S)


def _stop_when_left(session: RecordingSession, client: MessageSocket, over: threading.Event) -> None:
    with suppress(OSError):
        client.link.settimeout(None)
        while client.link.recv(1 << 12):
            pass
    if not over.is_set():
        session.stop()


_agent: Agent | None = None
_starting = threading.Lock()
_watches_forks = False


def start_agent(settings: AgentSettings) -> Agent:
    global _agent, _watches_forks
    with _starting:
        if _agent is None:
            try:
                agent = Agent(settings)
                try:
                    agent.start()
                except BaseException:
                    agent.close()
                    raise
            except (OSError, RuntimeError) as error:
                raise UserError("an agent cannot start in this process", _in_a_line(error)) from error
            _close_at_end(agent)
            if not _watches_forks:
                _watches_forks = True
                os.register_at_fork(after_in_child=_renew)
            _agent = agent
        return _agent


def _close_at_end(agent: Agent) -> None:
    atexit.register(agent.close)
    processes = sys.modules.get("multiprocessing.util")
    if processes is not None:
        # children of multiprocessing exit without atexit handlers, and drop inherited finalizers at their start
        processes.register_after_fork(agent, _close_at_end_of_child)
        _close_at_end_of_child(agent)


def _close_at_end_of_child(agent: Agent) -> None:
    from multiprocessing.util import Finalize

    Finalize(None, agent.close, exitpriority=0)


def agent_here() -> Agent | None:
    return _agent


def _in_a_line(error: BaseException) -> str:
    return str(error) if isinstance(error, UserError | ValueError) else one_line(error)


def _renew() -> None:
    global _agent, _starting
    _starting = threading.Lock()
    parent, _agent = _agent, None
    if parent is None:
        return
    try:
        parent.abandon()
        start_agent(parent.settings)
    except Exception as error:
        print(f"opgrip: a forked process does not accept requests to record: {_in_a_line(error)}", file=sys.stderr)


def listen_to(number: signal.Signals) -> None:
    """Record the next steps whenever a signal arrives, and report each recording on stderr."""
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            f"{number.name} cannot start a recording", "torch was loaded outside of the program's main thread"
        )
    if signal.getsignal(number) is not signal.SIG_DFL:
        raise UserError(f"the program already has a handler for {number.name}", "choose another signal")
    signal.signal(number, _ask)


def _ask(_number: int, _frame: FrameType | None) -> None:
    # the main thread runs this between two lines of the program, so no exception may escape
    try:
        threading.Thread(target=_record, name="opgrip-recording", daemon=True).start()
    except Exception as error:
        raise_if_from_program(error)
        with suppress(Exception):
            # the interrupted line may be writing to sys.stderr, which cannot be entered again
            os.write(2, f"opgrip: no trace was written: {one_line(error)}\n".encode())


def _record() -> None:
    try:
        # a forked process keeps the handler but has another agent
        agent = agent_here()
        if agent is None:
            lines = ["this process has no agent"]
        else:
            waiting = lambda why: print_lines([f"no step has begun yet: {why}"])  # noqa: E731
            lines = lines_of(agent.record(RecordingRequest(), waiting=waiting))
    except Exception as error:
        lines = [str(error) if isinstance(error, UserError) else one_line(error)]
    print_lines(lines)


def print_lines(lines: Iterable[str]) -> None:
    with suppress(Exception):
        for line in lines:
            print(f"opgrip: {line}", file=sys.stderr, flush=True)


def record_at_start(agent: Agent) -> None:
    # begin here: the program must not make a step meanwhile
    session = agent.begin(RecordingRequest(wait_s=inf), perf_counter_ns())
    recording = threading.Thread(
        target=lambda: print_lines(lines_of(agent.finish(session))), name="opgrip-recording", daemon=True
    )
    recording.start()
    pid = os.getpid()

    def end() -> None:
        if os.getpid() == pid:
            agent.close()
            recording.join(END_S)

    atexit.register(end)


class MarkedSteps:
    def __init__(self) -> None:
        self.listeners: tuple[Callable[[], None], ...] = ()
        self._next = count().__next__
        self._last = -1

    @property
    def steps(self) -> int:
        return self._last + 1

    def step(self) -> None:
        self._last = self._next()
        for listener in self.listeners:
            listener()


marks = MarkedSteps()


def step() -> None:
    """Mark the end of a step of the program and the start of the next one, for recordings on demand."""
    marks.step()


class Triggered:
    """A recording that the program requested with `trigger`.

    result : facts about the recording, such as `file`, `steps` and `calls`; None while it runs, and after an error
    """

    def __init__(self) -> None:
        self.result: dict[str, Any] | None = None
        self.problem: str | None = None
        self._armed, self._done = threading.Event(), threading.Event()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the recording has ended; return False if that takes longer than `seconds`."""
        return self._done.wait(seconds)

    def _run(self, agent: Agent, request: RecordingRequest) -> None:
        try:
            self.result = agent.record(request, lambda session: self._armed.set())
            self.problem = self.result["problem"]
        except Exception as error:
            self.problem = str(error) if isinstance(error, UserError) else one_line(error)
        finally:
            self._armed.set()
            self._done.set()


def trigger(
    output: str | Path | None = None,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    warmup: int | None = None,
    step_module: str | None = None,
    **options: Any,
) -> Triggered:
    """Record the next steps of this program, in any of its threads, in the background.

    output : name of the trace, a pattern such as `step-%h-%p-%n.jsonl`; None for the pattern set at the program's start
    seconds : time in seconds within which recorded steps may begin
    warmup : number of steps before the recorded ones, in which the capture examines new signatures
    step_module : pattern for the classes of modules whose outermost calls count as steps
    """
    # import here: two threads that import torch at once get incomplete modules
    from opgrip.capture.on_demand import session

    session.load()
    agent = start_agent(default_settings())
    path = None if output is None else str(Path(output).absolute())
    triggered = Triggered()
    request = RecordingRequest(path, steps, seconds, warmup, step_module, options=options)
    thread = threading.Thread(target=triggered._run, args=(agent, request), name="opgrip-recording", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise UserError("this process cannot record", one_line(error)) from error
    triggered._armed.wait()
    return triggered
