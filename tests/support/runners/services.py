"""Programs that are asked to record while they run."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from programs import program_path, wait_for

NO_RANK = {
    name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "PYTEST_XDIST_WORKER_COUNT")
}


@contextmanager
def running(folder: Path, *command: object, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A command that runs in a folder while the block does, and has said `ready` in a line of its own.

    Its sockets are in the folder, and what it says in `said.txt` and `errors.txt`.
    """
    with (folder / "said.txt").open("w") as said, (folder / "errors.txt").open("w") as errors:
        process = subprocess.Popen(
            list(map(str, command)), stdout=said, stderr=errors, text=True, cwd=folder, env=environment(folder, env)
        )
        try:
            wait_for(lambda: "ready\n" in (folder / "said.txt").read_text(), process)
            yield process
        finally:
            process.kill()
            process.wait()


@functools.cache
def short_name(folder: Path) -> Path:
    """A link to a folder: pytest's own have longer names than a socket's may be."""
    links = tempfile.mkdtemp(prefix="og")
    atexit.register(shutil.rmtree, links, ignore_errors=True)
    link = Path(links) / "f"
    link.symlink_to(folder)
    return link


SERVER = """
import time, torch
net = torch.nn.Linear(2, 2).eval()
print("ready", flush=True)
while True:
    net(torch.ones(1, 2))
    time.sleep(0.01)
"""
"""A program that runs until it is stopped, a step every hundredth of a second."""


def environment(folder: Path, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a program whose sockets are in a folder, and of who asks it."""
    return (
        NO_RANK
        | {"XDG_RUNTIME_DIR": str(short_name(folder)), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        | dict(env or {})
    )


def on_demand(*options: object) -> tuple[object, ...]:
    """A script with an agent: its options, and what follows `--`."""
    return (program_path("opcapture"), "--on-demand", *options)


def ask(folder: Path, *words: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """What `opcapture` answers to a verb in a folder where programs run."""
    return subprocess.run(
        [program_path("opcapture"), *map(str, words)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(folder),
        timeout=timeout,
        check=False,
    )


def python(*words: object) -> tuple[object, ...]:
    """A Python program without an agent."""
    return (sys.executable, *words)
