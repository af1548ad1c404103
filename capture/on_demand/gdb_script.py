"""What gdb runs in itself: lets a thread that waits without Python's lock run our file.

A thread that waits in a call of the system holds neither Python's lock nor malloc's, and may ask for both as any thread
does: the others run meanwhile. What it waited for, it waits for again afterwards.
"""

from __future__ import annotations

import os
import re
from typing import Any

WAITING = re.compile(
    r"_*(GI_+|libc_+|new_|do_)*(p?poll|p?select|epoll_p?wait\d?|accept4?|(clock_)?nanosleep|sem_\w*wait\w*|futex\w*|"
    r"pthread_cond_\w*wait\w*|recv\w*|read|pause|wait4|waitid)(_\w+)?(@.*)?"
)
"""Functions in which threads wait."""
LOCKS = re.compile(r"lll_lock|malloc|free|calloc|_dl_|dlopen|mutex_lock")
"""What is in the names of those that hold, or wait for, a lock of the C library."""
FRAMES = 6
LIBRARIES = (r"/libc[-.]", "/libpthread", "/libpython")
"""Of which gdb is to know the functions."""
SIGNALS = "SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGALRM SIGTERM SIGCHLD SIGWINCH SIGPROF SIGVTALRM SIGIO SIGPIPE"


def waits(thread: Any) -> bool:
    """Whether a thread waits in a call of the system, outside of the C library's own locks."""
    import gdb

    thread.switch()
    names: list[str] = []
    frame = gdb.newest_frame()
    while frame is not None and len(names) < FRAMES:
        names.append(frame.name() or "")
        frame = frame.older()
    return WAITING.fullmatch(names[0]) is not None and not any(map(LOCKS.search, names))


def run_file(path: str) -> None:
    """Let the first thread that waits run a Python file."""
    import gdb

    for name in LIBRARIES:
        gdb.execute(f"sharedlibrary {name}")
    # what comes meanwhile is for the program
    gdb.execute(f"handle {SIGNALS} nostop noprint pass")
    thread = next(
        (item for item in sorted(gdb.selected_inferior().threads(), key=lambda item: item.num) if waits(item)), None
    )
    if thread is None:
        print("opgrip: no thread waits")
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


if __name__ == "__main__":
    run_file(os.environ["OPGRIP_ATTACHED_FILE"])
