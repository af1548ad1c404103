"""Commands and small models that tests of several packages run."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import can_fork, run_forked
from torch import nn

from opgrip.capture import Capture
from opgrip.traces import Trace, load

ROOT = Path(__file__).resolve().parents[3]
# PYTHONPATH of the folders of shared test modules
SUPPORT_PATH = os.pathsep.join(str(folder) for folder in sorted(Path(__file__).resolve().parents[1].iterdir()))
MODULES = {"opreplay": "opgrip.replay.command.opreplay", "opgrip": "opgrip.tools.opgrip"}
# verbs of opgrip that only read files, and print or write what they contain
READING = {
    *("compare", "corpus", "longtail", "zoo baseline", "zoo list", "zoo show", "samples list", "samples show"),
    *("results list", "results merge", "results prune", "results score", "results show"),
    *("trace convert", "trace diff", "trace export-case", "trace graph", "trace info", "trace merge"),
    *("trace ranks", "trace redact", "trace timeline", "trace trim", "trace validate"),
}
SHIPPED_TRACES = sorted((ROOT / "traces").glob("*.jsonl"))


def program_path(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def run_command(
    name: str,
    *args: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
    timeout: float = 900,
) -> subprocess.CompletedProcess[str]:
    """Run a command: in this process if it only reads files and prints or writes what they contain, else in a fork."""
    words = list(map(str, args))
    is_reading = name == "opgrip" and not READING.isdisjoint((words[0], " ".join(words[:2])))
    if env is None and not fresh and (is_reading or (name == "opreplay" and "--list" in words)):
        return run_here(name, words, cwd)
    return run_python(program_path(name), *args, cwd=cwd, env=env, fresh=fresh, timeout=timeout)


def run_here(name: str, words: list[str], cwd: Path | None) -> subprocess.CompletedProcess[str]:
    output, errors = io.StringIO(), io.StringIO()
    main = import_module(MODULES[name]).main
    with redirect_stdout(output), redirect_stderr(errors), pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd or Path.cwd())
        try:
            status = main(words)
        except SystemExit as error:
            status = error.code
    return subprocess.CompletedProcess([name, *words], status, output.getvalue(), errors.getvalue())


def succeed(name: str, *args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command as `run_command` does, which must end with exit status 0."""
    done = run_command(name, *args, **options)
    assert done.returncode == 0, done.stderr
    return done


def refusal(name: str, *args: object, in_one_line: bool = False, **options: Any) -> str:
    """Return what a command writes to standard error, which must end with exit status 2.

    `opreplay` and `opgrip` run in this process if `options` has at most `cwd`: they refuse before they change anything.
    """
    if name == "opcapture" or options.keys() - {"cwd"}:
        done = run_command(name, *args, **options)
    else:
        done = run_here(name, list(map(str, args)), options.get("cwd"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert not in_one_line or done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def run_python(
    *args: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
    timeout: float = 900,
    status: int | None = None,
) -> subprocess.CompletedProcess[str]:
    words = list(map(str, args))
    if fresh or not can_fork(env):
        command = [sys.executable, *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=timeout, check=False)
    else:
        done = run_forked(words, cwd, env, timeout)
    assert status in (None, done.returncode), done.stdout + done.stderr
    return done


def receive_ctrl_c() -> None:
    """Let child processes receive Ctrl-C even if the tests run in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(event: Callable[[], bool], process: subprocess.Popen[Any], seconds: float = 300) -> None:
    """Wait until `event` returns True while a process runs; raise an error if it ends first or takes too long."""
    for _ in range(int(seconds / 0.05)):
        if event():
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            assert event(), f"the process ended with status {process.returncode} before"
            return
    process.kill()
    raise AssertionError(f"it did not happen in {seconds} s")


def flat_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from flat_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flat_tensors(item)
    elif hasattr(value, "pred_instances"):
        for name in sorted(value.pred_instances.keys()):
            yield from flat_tensors(getattr(value.pred_instances, name))


class TinyNet(nn.Module):
    """Model with convolution, batch norm, linear and an embedding: dense operators and one that reads indices."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, images: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        pooled = self.features(images).mean(dim=(2, 3))
        return self.head(pooled + self.embedding(words).sum(dim=1))


def captured(folder: Path, program: Callable[[], Any], name: str = "t.jsonl", **options: Any) -> Trace:
    with Capture(folder / name, force=True, **options):
        program()
    return load(folder / name, partial=False)


def train_tiny_net(path: Path, steps: int = 2, **options: object) -> Capture:
    torch.manual_seed(0)
    model = TinyNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, words = torch.randn(2, 3, 8, 8), torch.randint(0, 10, (2, 6))
    with Capture(path, model=model, **options) as capture:  # type: ignore[arg-type]
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images, words), torch.tensor([1, 4])).backward()
            optimizer.step()
    return capture
