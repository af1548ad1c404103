"""Python programs run in forks of a process that has imported torch and the commands but has run nothing.

A fork behaves like a fresh interpreter, without the seconds that imports take. The server process starts at the first
use, and ends with the process that started it.

    python tests/support/runners/forks.py NUMBER     # serve the socket that was inherited under this number
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import re
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

PACKAGES = ("cli", "display", "platform", "traces", "samples", "capture", "replay", "zoo", "tools")
# modules outside of the package that the commands and captures import
IMPORTED = (
    *("torch._dynamo.guards", "pandas.io.formats.csvs", "rich._emoji_codes", "sqlite3", "xml.sax.saxutils"),
    *("rich.console", "rich.table", "scipy.special", "pyarrow.pandas_compat", "jsonschema"),
)
# Modules of the package that are not imported: they need another runtime, which may start threads, or are scripts.
OTHERS = re.compile(r"_jax$|conversions|__main__")

PR_SET_CHILD_SUBREAPER = 36

# Prefixes of variables that a process reads once, when it starts; a fork applies PYTHONPATH separately.
READ_AT_START = ("PYTHON", "OMP_", "MKL_", "TORCH", "KINETO", "LD_", "MALLOC", "GLIBC")

_server: tuple[int, subprocess.Popen[bytes], socket.socket] | None = None
_ended_s = 0.0


def used_s() -> float:
    """Return the processor time in seconds of all forks that have ended and of their server."""
    if _server is None or _server[1].poll() is not None:
        return _ended_s
    # the kernel adds it to this process's children only when it ends
    words = Path(f"/proc/{_server[1].pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return _ended_s + sum(map(int, words[11:13])) / os.sysconf("SC_CLK_TCK")


def run_forked(
    argv: Sequence[str],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 600,
    terminal: int | None = None,
    together: bool = False,
) -> subprocess.CompletedProcess[str]:
    request = {"argv": list(argv), "cwd": str(cwd or Path.cwd()), "env": dict(os.environ if env is None else env)}
    mine, theirs = socket.socketpair()
    with mine, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull, "rb") as none:
        with theirs:
            output = out.fileno() if terminal is None else terminal
            files = [theirs.fileno(), none.fileno(), output, output if together else err.fileno()]
            socket.send_fds(_control(), [json.dumps(request).encode()], files)
        mine.settimeout(timeout)
        child = 0
        try:
            child = int(mine.recv(20))
            status = _end_of_fork(mine)
        except TimeoutError as error:
            if child:
                os.kill(child, signal.SIGKILL)
                mine.settimeout(10)
                with suppress(TimeoutError):
                    _end_of_fork(mine)
            raise subprocess.TimeoutExpired(list(argv), timeout) from error
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess(list(argv), status, *texts)


def _end_of_fork(reply: socket.socket) -> int:
    """Wait for the end of a fork, return its exit status, and add its processor time to the total."""
    global _ended_s
    status, used_us = map(int, reply.recv(40).split())
    _ended_s += used_us / 1e6
    return status


def start_worker(command: Sequence[str], **options: Any) -> Any:
    """Replace `subprocess.Popen` for the worker of a replay (`sandbox.Child`): start it in a fork.

    This process becomes the parent of the fork, whose own parent ends at once. In bubblewrap, and in a process that
    did not start the server, the worker is a new interpreter.
    """
    if (
        not options.get("pass_fds")
        or command[0] != sys.executable
        or (_server is not None and _server[0] != os.getpid())
    ):
        return subprocess.Popen(command, **options)
    passed = [*options["pass_fds"]]
    request = {"argv": command[1:], "cwd": str(Path.cwd()), "env": dict(options["env"]), "passed": passed}
    mine, theirs = socket.socketpair()
    with mine:
        with theirs:
            streams = [options["stdin"], options["stdout"], options["stderr"].fileno()]
            files = [theirs.fileno(), *streams, *passed]
            socket.send_fds(_control(), [json.dumps(request).encode()], files)
        _adopt_orphans(True)
        try:
            # the fork closes its end once this process is its parent
            pid = int(mine.recv(20))
            mine.recv(1)
        finally:
            _adopt_orphans(False)
    return SimpleNamespace(pid=pid, returncode=None)


def _adopt_orphans(on: bool) -> None:
    """Make this process the parent of descendants whose parents end, if `on` is True; else leave them to the system."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on))


# replacement of the module `subprocess` in `opgrip.platform.sandbox` for tests
WORKERS = SimpleNamespace(**{**vars(subprocess), "Popen": start_worker})

# replacement of the module `subprocess` for a sample's import check, which runs in a fork
PROVING = SimpleNamespace(
    run=lambda command, cwd, env, timeout, **_: run_forked(command[1:], cwd, env, timeout),
    TimeoutExpired=subprocess.TimeoutExpired,
)


def can_fork(env: Mapping[str, str] | None) -> bool:
    """Return True if a fork can take the environment `env`: no variable differs that is only read at Python's start."""
    if env is None:
        return True
    changed = {name for name in {*env, *os.environ} if env.get(name) != os.environ.get(name)} - {"PYTHONPATH"}
    return not any(name.startswith(READ_AT_START) for name in changed)


def _control() -> socket.socket:
    global _server
    if _server is not None and (_server[0] != os.getpid() or _server[1].poll() is not None):
        _server = None
    if _server is None:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        _server = os.getpid(), process, ours
        atexit.register(ours.close)
    return _server[2]


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Start a fork for each request, and report the end of each.

    Returns
    -------
    The request in the fork that runs it, or None in the server when all clients have gone.
    """
    running: dict[int, tuple[int, int]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in running:
                    selector.unregister(key.fd)
                    _report_end(key.fd, *running.pop(key.fd))
                    continue
                message, files, _, _ = socket.recv_fds(control, 1 << 20, 8)
                if not message:
                    return None
                request: dict[str, Any] = json.loads(message)
                child = os.fork()
                if child == 0:
                    control.close()
                    for number in (*running, *(reply for _, reply in running.values())):
                        os.close(number)
                    _take_files(request, files)
                    return request
                for number in files[1:]:
                    os.close(number)
                if "passed" in request:
                    os.close(files[0])
                    os.waitpid(child, 0)
                else:
                    os.write(files[0], b"%20d" % child)
                    ended = os.pidfd_open(child)
                    running[ended] = child, files[0]
                    selector.register(ended, selectors.EVENT_READ)


def _report_end(ended: int, child: int, reply: int) -> None:
    _, status, usage = os.wait4(child, 0)
    used_us = 1e6 * (usage.ru_utime + usage.ru_stime)
    # its client may have given up
    with suppress(BrokenPipeError):
        os.write(reply, b"%19d %20d" % (os.waitstatus_to_exitcode(status), used_us))
    os.close(ended)
    os.close(reply)


def _take_files(request: Mapping[str, Any], files: Sequence[int]) -> None:
    """Replace this fork's standard streams by the streams of the request; in a worker of a replay, fork again first."""
    reply, *streams = files
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "passed" in request:
        passed, streams = streams[3:], streams[:3]
        middle, child = os.getpid(), os.fork()
        if child:
            os.write(reply, b"%20d" % child)
            os._exit(0)
        while os.getppid() == middle:
            os.sched_yield()
    os.close(reply)
    for stream, number in enumerate(streams):
        os.dup2(number, stream)
        os.close(number)
    if "passed" in request:
        # one may have the number of another's copy
        copies = [fcntl.fcntl(number, fcntl.F_DUPFD, 1 << 9) for number in passed]
        for copy, number in zip(copies, request["passed"], strict=True):
            os.dup2(copy, number)
            os.close(copy)
        os.setsid()
    importlib.import_module("opgrip.capture.grip.sample_folder").subprocess = PROVING


def prepare(request: Mapping[str, Any]) -> None:
    path = request["env"].get("PYTHONPATH", "")
    known = os.environ.get("PYTHONPATH", "")
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if path != known:
        sys.path[:0] = path.split(os.pathsep)
        # which may have packages with plug-ins
        for registry in registries():
            registry._loaded = False


def registries() -> list[Any]:
    kind = importlib.import_module("opgrip.cli.plugins").Registry
    modules = [module for name, module in sys.modules.items() if name.startswith("opgrip.")]
    return [value for module in modules for value in vars(module).values() if isinstance(value, kind)]


def run(argv: list[str]) -> None:
    sys.argv[:] = argv
    if argv[0] == "-c":
        sys.argv[:] = ["-c", *argv[2:]]
        sys.path.insert(0, "")
        namespace = vars(sys.modules["__main__"])
        for name in set(namespace) - {"__name__", "__builtins__"}:
            del namespace[name]
        exec(compile(argv[1], "<string>", "exec"), namespace)
    elif argv[0] == "-m":
        sys.argv[:] = argv[1:]
        sys.path.insert(0, "")
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
        runpy.run_path(argv[0], run_name="__main__")


def status_of(argv: list[str]) -> int:
    try:
        run(argv)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def end(status: int) -> NoReturn:
    """End as an interpreter does, but without clearing modules, which takes as long as importing them."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(status)


def main(number: int) -> None:
    """Import the modules that the commands use, and fork for each request on the socket with descriptor `number`."""
    for name in IMPORTED:
        importlib.import_module(name)
    for name in PACKAGES:
        package = importlib.import_module(f"opgrip.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not OTHERS.search(module.name):
                importlib.import_module(module.name)
    for registry in registries():
        registry.names()
    quiet = importlib.import_module("quiet")
    importlib.import_module(quiet.MEASURING).Contention = quiet.QuietMachine
    # clearing torch's operator libraries at exit would take 30 ms in each fork
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    # otherwise garbage collection in a fork would copy all of it
    gc.freeze()
    asked = serve(socket.socket(fileno=number))
    if asked is not None:
        # this file's folder
        del sys.path[0]
        prepare(asked)
        end(status_of(asked["argv"]))


if __name__ == "__main__":
    # import under another name, since programs run as `__main__`
    importlib.import_module("forks").main(int(sys.argv[1]))
