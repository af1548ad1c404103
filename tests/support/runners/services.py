"""Programs that are asked to record while they run."""

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
    """Run a command in a folder during the block, which begins when the command has printed the line `ready`.

    The command's sockets are in the folder, as is its output, in `said.txt` and `errors.txt`.
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
    """Return a link to a folder: paths of pytest's folders are too long for sockets."""
    links = tempfile.mkdtemp(prefix="og")
    atexit.register(shutil.rmtree, links, ignore_errors=True)
    link = Path(links) / "f"
    link.symlink_to(folder)
    return link


# program that runs until it is stopped, with a step every 10 ms
SERVER = """
import time, torch
net = torch.nn.Linear(2, 2).eval()
print("ready", flush=True)
while True:
    net(torch.ones(1, 2))
    time.sleep(0.01)
"""


def environment(folder: Path, env: Mapping[str, str] | None = None) -> dict[str, str]:
    return (
        NO_RANK
        | {"XDG_RUNTIME_DIR": str(short_name(folder)), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        | dict(env or {})
    )


def on_demand(*options: object) -> tuple[object, ...]:
    return (program_path("opcapture"), "--on-demand", *options)


def ask(folder: Path, *words: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
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
    return (sys.executable, *words)
