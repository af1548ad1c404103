"""Fixtures shared by the tests of several packages: traces of small real models, captured once per run."""

import fcntl
import gc
import importlib
import os
import random
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from types import ModuleType

# Divide the processors among the processes that run tests, since more threads would spin while they wait for each
# other. The process that only starts these processes keeps its threads: they would all inherit its setting.
if WORKERS := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // int(WORKERS))))

import numpy as np
import pytest
import torch
from busy import TimesDisagree, usage_now
from forks import PROVING, WORKERS
from hypothesis import HealthCheck, settings
from others import MOST_BY_OTHERS, share_of_others
from programs import succeed, train_tiny_net
from quiet import MEASURING, QuietMachine
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from opgrip.capture.grip import sample_folder as proof
from opgrip.platform import sandbox
from opgrip.replay.modes.conversions.runtimes import THREADS

# modules imported by processes of tests leave no files next to them
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
# XLA starts only once per process: let it start with one thread, as tests of modes require
os.environ.setdefault(THREADS, "1")

# commands run by tests keep no results next to their inputs
os.environ["OPGRIP_STORE"] = ""

KEPT = "opgrip/passed"  # key in pytest's cache
_projects = count()

# based on the profile that hypothesis has chosen, with which CI generates the same examples in every run
settings.register_profile(
    "tests",
    settings(),
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("tests")

SEED = 0
# test modules draw numbers when they are imported
torch.manual_seed(SEED)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Write compiled test modules to `__pycache__`: rewriting their assertions takes ten seconds in each process.

    Garbage collection is off during the collection, and never searches the collected objects.
    """
    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", False)
        collected = yield
    gc.freeze()
    gc.enable()
    return collected


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    number = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(number, kind)
        yield
    finally:
        # closing does not unlock it if a process that was forked meanwhile still runs
        fcntl.flock(number, fcntl.LOCK_UN)
        os.close(number)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test marked `alone` while no other process runs a test; processes take turns in the order they ask."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    here, kind = Path(__file__), fcntl.LOCK_SH if item.get_closest_marker("alone") is None else fcntl.LOCK_EX
    with ExitStack() as stack:
        with _locked(here, fcntl.LOCK_EX):
            stack.enter_context(_locked(here.parent, kind))
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skip a test if its comparison of times fails while other processes used the processors."""
    before = usage_now()
    try:
        return (yield)
    except TimesDisagree:
        others = share_of_others(before, usage_now())
        if item.get_closest_marker("alone") is None or others < MOST_BY_OTHERS:
            raise
        pytest.skip(f"busy: other processes took {others:.0%} of the processors")


@pytest.fixture(scope="session", autouse=True)
def _machine_of_tests() -> Iterator[None]:
    """Simulate an idle machine, fork workers and checks of samples as `forks` does, and separate the sockets.

    Programs that can be recorded are visible only to the test process that started them.
    """
    with TemporaryDirectory(prefix="og") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module(MEASURING), "Contention", QuietMachine)
        patch.setattr(proof, "subprocess", PROVING)
        patch.setattr(sandbox, "subprocess", WORKERS)
        patch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@pytest.fixture(autouse=True)
def _fixed_seed_without_leftover_mode() -> Iterator[None]:
    """Seed all random generators before each test, and fail a test that leaves a dispatch mode active.

    torch would compile nothing in later tests of the process. `torch.manual_seed` would format the stack each time, for
    the devices that it seeds later.
    """
    torch.default_generator.manual_seed(SEED)
    np.random.seed(SEED)
    random.seed(SEED)
    yield
    assert not is_in_torch_dispatch_mode()


class Passed:
    def __init__(self, cache: pytest.Cache) -> None:
        self._cache = cache
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._cache.set(KEPT, sorted(self._passed - self._failed))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--not-passed", action="store_true", help="skip quick tests that passed in the last run")


def pytest_configure(config: pytest.Config) -> None:
    """Record passed tests except in xdist workers."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # shells start background jobs with this setting, under which tests of interrupts would never end
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cache = getattr(config, "cache", None)
    if cache is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Passed(cache))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests by `--not-passed`, and sort the others: slow tests first, tests marked `alone` last."""
    if config.getoption("--not-passed") and config.cache is not None:
        ids = set(config.cache.get(KEPT, []))
        passed = {item for item in items if item.nodeid in ids and item.get_closest_marker("slow") is None}
        config.hook.pytest_deselected(items=list(passed))
        items[:] = [item for item in items if item not in passed]
    items.sort(key=order_of)


def order_of(item: pytest.Item) -> tuple[bool, bool, float]:
    """Return the sort key of a test: slow tests first, tests marked `alone` last, then by descending time limit."""
    timeout = item.get_closest_marker("timeout")
    seconds = float(timeout.args[0]) if timeout is not None else 0.0
    return item.get_closest_marker("slow") is None, item.get_closest_marker("alone") is not None, -seconds


@pytest.fixture(scope="session")
def tiny_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "tiny.jsonl"
    train_tiny_net(path)
    return path


@pytest.fixture(scope="session")
def detector_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.getbasetemp()
    # one process captures it for all
    path = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "detector.jsonl"
    with _locked(Path(__file__).with_name("support"), fcntl.LOCK_EX):
        if not path.exists():
            succeed("opcapture", "--input-size", "96", "--batch-size", "1", "--warmup", "1", "--steps", "1", "-o", path)
    return path


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Yield a function that makes a package of modules from their texts, and returns the imported module `main`."""
    made: list[str] = []

    def make(main: str, **others: str) -> ModuleType:
        name = f"gripped_project_{next(_projects)}"
        made.append(name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        for module, text in {"main": main, **others}.items():
            (tmp_path / name / f"{module}.py").write_text(dedent(text))
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module(f"{name}.main")

    yield make
    for module in [known for known in sys.modules if known.partition(".")[0] in made]:
        del sys.modules[module]
