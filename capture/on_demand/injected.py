"""Code that runs inside gdb, and then inside the process to which an agent is attached.

gdb makes a thread that waits in a system call run this file. Such a thread holds neither Python's interpreter lock nor
malloc's lock, and can take both, because the other threads keep running.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

# pattern of functions in which threads wait
_WAITING = re.compile(
    r"_*(GI_+|libc_+|new_|do_)*(p?poll|p?select|epoll_p?wait\d?|accept4?|(clock_)?nanosleep|sem_\w*wait\w*|futex\w*|"
    r"pthread_cond_\w*wait\w*|recv\w*|read|pause|wait4|waitid)(_\w+)?(@.*)?"
)
# pattern of functions that hold a lock of the C library, or wait for one
_LOCKS = re.compile(r"lll_lock|malloc|free|calloc|_dl_|dlopen|mutex_lock")
_FRAMES = 6
_LIBRARIES = (r"/libc[-.]", "/libpthread", "/libpython")  # patterns of libraries whose symbols gdb must load
_SIGNALS = "SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGALRM SIGTERM SIGCHLD SIGWINCH SIGPROF SIGVTALRM SIGIO SIGPIPE"


def start_agent_here() -> None:
    """Start the agent in this process. No error is raised, because the calling thread belongs to the program."""
    try:
        from opgrip.capture.on_demand.agent import start_agent
        from opgrip.capture.on_demand.settings import default_settings

        start_agent(default_settings())
    except Exception as error:
        print(f"opgrip: no agent was started in this process: {' '.join(str(error).split())}", file=sys.stderr)


def run_in_target(path: str) -> None:
    """Make the first waiting thread of the process that gdb has stopped run a Python file. Runs inside gdb."""
    import gdb

    for name in _LIBRARIES:
        gdb.execute(f"sharedlibrary {name}")
    # signals that arrive now belong to the program
    gdb.execute(f"handle {_SIGNALS} nostop noprint pass")
    threads = sorted(gdb.selected_inferior().threads(), key=lambda item: item.num)
    thread = next(filter(_waits, threads), None)
    if thread is None:
        print("opgrip: no agent was started, because all threads of the process are running: try again")
        return
    thread.switch()
    code = f"exec(compile(open({path!r}).read(), {path!r}, 'exec'), {{'__name__': '<opgrip>'}})"
    text = code.replace("\\", "\\\\").replace('"', '\\"')
    gdb.execute("set scheduler-locking off")
    gdb.execute("set unwindonsignal on")
    gdb.execute("set $opgrip = (int) PyGILState_Ensure()")
    try:
        gdb.execute(f'call (int) PyRun_SimpleString("{text}")')
    finally:
        gdb.execute("call (void) PyGILState_Release($opgrip)")
    print("opgrip: done")


def _waits(thread: Any) -> bool:
    """Return True if a thread of the stopped process waits in a system call and not for a lock of the C library."""
    import gdb

    thread.switch()
    names: list[str] = []
    frame = gdb.newest_frame()
    while frame is not None and len(names) < _FRAMES:
        names.append(frame.name() or "")
        frame = frame.older()
    return _WAITING.fullmatch(names[0]) is not None and not any(map(_LOCKS.search, names))


if "gdb" in sys.modules:
    run_in_target(os.environ["OPGRIP_ATTACHED_FILE"])
elif __name__ in ("__main__", "<opgrip>"):
    start_agent_here()
