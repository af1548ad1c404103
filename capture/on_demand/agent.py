"""The agent: a thread in the recorded process that waits for clients' requests to record."""

from __future__ import annotations

import atexit
import errno
import os
import platform
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
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
    RecordingRequest,
    check_request,
    make_folder,
    may_ask,
    request_of,
    socket_path,
)
from opgrip.capture.on_demand.settings import AgentSettings
from opgrip.capture.program.processes import rank
from opgrip.errors import UserError, one_line

if TYPE_CHECKING:
    from opgrip.capture.on_demand.session import RecordingSession

MOST_CONNECTIONS = 8  # maximum number of simultaneous clients; more are disconnected
REQUEST_S = 2.0  # time in seconds within which a complete request must arrive
MOST_FAILURES = 100  # maximum number of distinct failures that are counted
END_S = 10.0  # time in seconds for writing a recording when the program ends
PAUSE_S = 0.1  # pause in seconds before another attempt, for example after the system ran out of file descriptors


class Agent:
    """Agent of this process, which answers requests over a socket.

    path : path of the socket
    failures : number of errors in the agent, by message; they do not reach the program
    """

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
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # clients remove sockets without a listener, so name the socket only once it listens
            hidden = self.path.with_suffix(".new")
            self._listener.bind(str(hidden))
            hidden.chmod(0o600)
            self._listener.listen(MOST_CONNECTIONS)
            hidden.rename(self.path)
        except OSError:
            self._listener.close()
            raise

    @property
    def is_recording(self) -> bool:
        """True while a recording runs, or waits for its first step."""
        return self._session is not None

    def start(self) -> None:
        threading.Thread(target=self._serve, name="opgrip-agent", daemon=True).start()

    def record(
        self,
        request: RecordingRequest,
        armed: Callable[[RecordingSession], None] = lambda session: None,
        waiting: Callable[[str], None] = lambda why: None,
    ) -> dict[str, Any]:
        """Record steps as requested, and return the result, as `finish` does; raise `UserError` if not possible.

        armed : called with the recording once it can begin at the next step
        waiting : called with the reason if no step begins for some time
        """
        asked_ns = time.perf_counter_ns()
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
        """Prepare a recording that begins at the next step; return it, to be passed to `finish`.

        asked_ns : time at which the request arrived, by `perf_counter_ns`
        """
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
        """Wait until a recording has ended; return its result: `file`, numbers of `steps` and `calls`, and others.

        waiting : called with the reason if no step begins for some time
        """
        try:
            result = session.finish(waiting)
            self.recordings += bool(result["file"])
            return result
        finally:
            self._session = None
            self._free.release()

    def stop(self) -> bool:
        """End the current recording; return True if there was one."""
        session = self._session
        if session is not None:
            session.stop()
        return session is not None

    def about(self) -> dict[str, Any]:
        """Return a description of this process: its program, rank and state."""
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
        """Stop listening, end the recording, and remove the socket. In a forked process, do nothing."""
        if os.getpid() != self._pid:
            return
        self._is_closed = True
        with suppress(OSError):
            self.path.unlink()
        with suppress(OSError):
            # wakes the listening thread
            self._listener.shutdown(socket.SHUT_RDWR)
        session = self._session
        if session is not None:
            session.stop(grace_s=0.0)
            if self._free.acquire(timeout=END_S):
                self._free.release()

    def abandon(self) -> None:
        """Close this forked process's copy of its parent's agent."""
        if self._session is not None:
            self._session.abandon()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError as error:
                if self._is_closed or error.errno in (errno.EBADF, errno.EINVAL):
                    self._listener.close()
                    return
                # for example too many open files, some of which the program may close
                self._fail(error)
                time.sleep(PAUSE_S)
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
                self._do(client, link)
        except Exception as error:
            self._fail(error)
            with suppress(OSError):
                client.send({"answer": REFUSED, "why": _in_a_line(error)})
        finally:
            with suppress(OSError):
                # a process forked in the meantime keeps the connection open
                link.shutdown(socket.SHUT_RDWR)
            client.close()
            self._room.release()

    def _do(self, client: MessageSocket, link: socket.socket) -> None:
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
            answer(DONE, self._record_for(link, request, answer))

    def _record_for(
        self, link: socket.socket, request: RecordingRequest, answer: Callable[[str, Mapping[str, Any]], None]
    ) -> dict[str, Any]:
        """Record for a client until the recording ends or the client disconnects; return the result of `finish`."""
        over = threading.Event()

        def armed(session: RecordingSession) -> None:
            answer(ARMED, {"file": str(session.path)})
            watch = threading.Thread(
                target=_stop_when_left, args=(session, link, over), name="opgrip-link", daemon=True
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
                link.shutdown(socket.SHUT_RD)

    def _fail(self, error: Exception) -> None:
        # mistakes of clients do not count as failures
        if not isinstance(error, UserError) and len(self.failures) < MOST_FAILURES:
            self.failures[_in_a_line(error)] += 1


def _wait_for_torch(most_s: float) -> None:
    """Wait until the program has loaded torch, because two threads that import torch at once get incomplete modules."""
    until_s = time.monotonic() + most_s
    while (torch := sys.modules.get("torch")) is None or getattr(torch.__spec__, "_initializing", False):
        if time.monotonic() >= until_s:
            raise UserError(f"process {os.getpid()} has not loaded torch yet", "try again later")
        time.sleep(PAUSE_S)


def _stop_when_left(session: RecordingSession, link: socket.socket, over: threading.Event) -> None:
    """Stop a recording when its client disconnects, unless the event `over` shows that it has ended."""
    with suppress(OSError):
        link.settimeout(None)
        while link.recv(1 << 12):
            pass
    if not over.is_set():
        session.stop()


_agent: Agent | None = None
_starting = threading.Lock()
_watches_forks = False


def start_agent(settings: AgentSettings) -> Agent:
    """Return the agent of this process, which is started if there is none.

    Raises UserError: a socket or thread cannot be created.
    """
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
    """Start an agent in a forked process, in place of the one inherited from the parent."""
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
