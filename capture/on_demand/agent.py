"""The agent: listens in a process for who asks it to record. It is a thread that sleeps until then."""

from __future__ import annotations

import atexit
import errno
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from opgrip.capture.on_demand.folder import make_folder, socket_path
from opgrip.capture.on_demand.settings import Request, Settings
from opgrip.capture.on_demand.words import (
    ABOUT,
    ARMED,
    DONE,
    PROTOCOL,
    RECORD,
    REFUSED,
    REQUESTS,
    STOP,
    TELL,
    Connection,
    may_ask,
)

if TYPE_CHECKING:
    from opgrip.capture.on_demand.session import Session

MOST_CONNECTIONS = 8
"""Conversations at once; another one is closed."""
REQUEST_S = 2.0
"""For a request to come whole."""
MOST_FAILURES = 100
"""Kinds of them that are counted."""
END_S = 10.0
"""For a recording to be written when the program ends."""
PAUSE_S = 0.1
"""Between two tries, as after the system had no room for a conversation."""


class Agent:
    """Answers requests over a socket of this process's own.

    Attributes
    ----------
    path : of the socket
    failures : what went wrong here, and how often: nothing of it reaches the program
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.failures: Counter[str] = Counter()
        self.recordings = 0
        self._pid = os.getpid()
        self._started_s = time.time()
        self._session: Session | None = None
        self._free = threading.Lock()
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._is_closed = False
        self.path = socket_path(make_folder())
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # a socket at which nobody listens yet is taken for one that was left behind
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
        """Whether a recording runs, or waits for its first step."""
        return self._session is not None

    def start(self) -> None:
        """Listen from now on."""
        threading.Thread(target=self._serve, name="opgrip-agent", daemon=True).start()

    def record(self, request: Request, answer: Any = lambda word, fields: None) -> dict[str, Any]:
        """Record, and tell what was recorded.

        Parameters
        ----------
        answer : is told once the next step will be noticed

        Raises
        ------
        UserError : where it cannot be done
        """
        asked_ns = time.perf_counter_ns()
        _wait_for_torch(request.wait_s)
        from opgrip.capture.on_demand.session import Session
        from opgrip.errors import UserError

        waiting = self._session
        gives_way = waiting is not None and not request.sampled and waiting.give_way()
        if not self._free.acquire(timeout=END_S if gives_way else 0):
            raise UserError(f"process {self._pid} is recording already", f"end that with opcapture stop {self._pid}")
        try:
            self._session = Session(self.settings, request, self.recordings + 1, asked_ns)
            result = self._session.run(lambda told: answer(ARMED, told))
            self.recordings += bool(result["file"])
            return result
        finally:
            self._session = None
            self._free.release()

    def stop(self, discard: bool = False) -> bool:
        """End the recording that runs, and leave no file of it where it is discarded; False where none runs."""
        session = self._session
        if session is not None:
            session.stop(discard)
        return session is not None

    def about(self) -> dict[str, Any]:
        """What this process is."""
        from opgrip.capture.on_demand.about import describe

        own = {"name": self.settings.name, "recordings": self.recordings, "recording": self.is_recording}
        return describe() | own | {"agent_started_unix": self._started_s, "failures": dict(self.failures)}

    def close(self) -> None:
        """Listen no more, end what is recorded, and take the socket away, where it is this process's own."""
        if os.getpid() != self._pid:
            return
        self._is_closed = True
        with suppress(OSError):
            self.path.unlink()
        with suppress(OSError):
            # wakes the thread that waits
            self._listener.shutdown(socket.SHUT_RDWR)
        session = self._session
        if session is not None:
            session.stop(grace_s=0.0)
            if self._free.acquire(timeout=END_S):
                self._free.release()

    def abandon(self) -> None:
        """Forget the parent's agent in a process that it has forked."""
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
                # such as too many open files, of which the program may close some
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
        connection = Connection(link)
        try:
            if may_ask(link):
                self._do(connection, link)
        except Exception as error:
            self._fail(error)
            with suppress(OSError):
                connection.send({"answer": REFUSED, "why": _in_a_line(error)})
        finally:
            with suppress(OSError):
                # a process that was forked meanwhile holds the link open
                link.shutdown(socket.SHUT_RDWR)
            connection.close()
            self._room.release()

    def _do(self, connection: Connection, link: socket.socket) -> None:
        request = connection.receive(REQUEST_S)
        if request is None:
            return
        word = check_request(request)

        def answer(word: str, told: Mapping[str, Any]) -> None:
            # whoever asked may have gone meanwhile
            with suppress(OSError):
                connection.send({"answer": word, **told})

        if word == TELL:
            answer(ABOUT, self.about())
        elif word == STOP:
            answer(DONE, {"stopped": self.stop(request.get("discard") is True)})
        elif word == RECORD:
            answer(DONE, self._record_for(link, request_of(request), answer))

    def _record_for(
        self, link: socket.socket, request: Request, answer: Callable[[str, Mapping[str, Any]], None]
    ) -> dict[str, Any]:
        """Record for as long as who asked is there."""
        over = threading.Event()

        def armed(word: str, told: Mapping[str, Any]) -> None:
            arguments = (self._session, link, over)
            answer(word, told)
            watch = threading.Thread(target=_stop_when_left, args=arguments, name="opgrip-link", daemon=True)
            # without a thread for it, the recording goes on to its own end
            with suppress(RuntimeError):
                watch.start()

        try:
            return self.record(request, armed)
        finally:
            over.set()
            with suppress(OSError):
                # wakes the thread that watches
                link.shutdown(socket.SHUT_RD)

    def _fail(self, error: Exception) -> None:
        from opgrip.errors import UserError

        # a mistake of who asks is no failure
        if not isinstance(error, UserError) and len(self.failures) < MOST_FAILURES:
            self.failures[_in_a_line(error)] += 1


def _wait_for_torch(most_s: float) -> None:
    """Return when the program has loaded torch: two threads that load it at once get modules that are half done.

    Raises
    ------
    UserError : where it has not by then
    """
    until_s = time.monotonic() + most_s
    while (torch := sys.modules.get("torch")) is None or getattr(torch.__spec__, "_initializing", False):
        if time.monotonic() >= until_s:
            from opgrip.errors import UserError

            raise UserError(f"process {os.getpid()} has not loaded torch yet", "ask again when it has")
        time.sleep(PAUSE_S)


def _stop_when_left(session: Session, link: socket.socket, over: threading.Event) -> None:
    """Stop a recording that is not over when who asked for it goes away."""
    with suppress(OSError):
        link.settimeout(None)
        while link.recv(1 << 12):
            pass
    if not over.is_set():
        session.stop()


def check_request(request: Mapping[str, Any]) -> str:
    """What is asked for; `ValueError` for what is no request."""
    if request.get("protocol") != PROTOCOL:
        raise ValueError(f"this process speaks protocol {PROTOCOL}, and who asks another: use the opgrip of its own")
    word = request.get("do")
    if word not in REQUESTS:
        raise ValueError(f"it can be asked to {', '.join(REQUESTS)}")
    return str(word)


def request_of(message: Mapping[str, Any]) -> Request:
    """The recording that a message asks for; `ValueError` for one that has fields which are none."""
    kinds: dict[str, type | tuple[type, ...]] = {
        "output": str,
        "steps": int,
        "seconds": (int, float),
        "warmup": int,
        "step_module": str,
        "begins_at": int,
        "wait_s": (int, float),
        "options": dict,
    }
    values = {item.name: message[item.name] for item in fields(Request) if message.get(item.name) is not None}
    for name, value in values.items():
        if not isinstance(value, kinds[name]) or isinstance(value, bool):
            raise ValueError(f"{name} cannot be {value!r:.40}")
        if isinstance(value, int | float) and not value >= 0:
            raise ValueError(f"{name} cannot be negative, or no number")
    if values.get("steps") == 0:
        raise ValueError("steps cannot be 0")
    return Request(**values)


_agent: Agent | None = None
_starting = threading.Lock()


def start_agent(settings: Settings) -> Agent:
    """The agent of this process, started where there is none.

    Raises
    ------
    UserError : where it cannot have a socket or a thread
    """
    global _agent
    with _starting:
        if _agent is None:
            agent = _listening(settings)
            _close_at_end(agent)
            _watch_forks()
            _agent = agent
        return _agent


def _listening(settings: Settings) -> Agent:
    from opgrip.errors import UserError

    try:
        agent = Agent(settings)
        try:
            agent.start()
        except BaseException:
            agent.close()
            raise
    except (OSError, RuntimeError) as error:
        raise UserError("this process can have no agent", _in_a_line(error)) from error
    return agent


def _close_at_end(agent: Agent) -> None:
    atexit.register(agent.close)
    processes = sys.modules.get("multiprocessing.util")
    if processes is not None:
        # children of multiprocessing end without atexit, and forget when they begin what was to be done at their end
        processes.register_after_fork(agent, _close_at_end_of_child)
        _close_at_end_of_child(agent)


def _close_at_end_of_child(agent: Agent) -> None:
    from multiprocessing.util import Finalize

    Finalize(None, agent.close, exitpriority=0)


def agent_here() -> Agent | None:
    """The agent of this process; None where there is none."""
    return _agent


def _in_a_line(error: BaseException) -> str:
    from opgrip.errors import UserError, one_line

    return str(error) if isinstance(error, UserError | ValueError) else one_line(error)


_watched = False


def _watch_forks() -> None:
    global _watched
    if not _watched:
        _watched = True
        os.register_at_fork(after_in_child=_renew)


def _renew() -> None:
    """Give a forked process an agent of its own."""
    global _agent, _starting
    _starting = threading.Lock()
    parent, _agent = _agent, None
    if parent is None:
        return
    try:
        parent.abandon()
        start_agent(parent.settings)
    except Exception as error:
        print(f"opgrip: a forked process cannot be asked to record: {_in_a_line(error)}", file=sys.stderr)
