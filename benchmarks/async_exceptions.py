"""Check that exceptions which interrupt a captured program at any moment reach it exactly once.

Signal handlers, `PyThreadState_SetAsyncExc`, Ctrl-C and a timeout decorator raise in the middle of operators, training
steps and loops over a DataLoader. Whatever code of the capture runs at that moment, the exception must reach the
program, the trace must be valid, and each call must be in it or counted as lost.

    python benchmarks/async_exceptions.py [--exceptions 1000] [--seed 0]
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import random
import signal
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from opgrip.capture import Capture
from opgrip.traces import load
from opgrip.traces.analysis.validation import validate

DELAY_S = 4e-3  # longest time from the start of a loop to the exception
SWALLOWED_S = 20.0  # time after which an exception counts as swallowed

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "full values": {"values": "full"},
    "last 100": {"last": 100},
    "private": {"private": True},
    "write ahead": {"write_ahead": True},
    "opaque": {"compiled": "opaque"},
}


class Late(Exception):
    """Exception class that only the program defines."""


class TakesText(Exception):
    """Exception whose constructor formats its arguments."""

    def __init__(self, text: str = "timed out") -> None:
        super().__init__(text)


KINDS: tuple[type[Exception], ...] = (Late, TakesText, TimeoutError, RuntimeError, NotImplementedError)


class Counting(TorchDispatchMode):
    """Count operators independently of the capture."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def operators() -> None:
    x = torch.eye(8)
    for size in range(2, 6):
        y = torch.ones(size, 8) @ x
        y.clamp_(min=0.0).add_(1)
        y.sum().item()


class Trainer:
    """Training of a small model."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def __call__(self) -> None:
        with torch.autocast("cpu", enabled=False):
            loss = self.model(torch.ones(2, 8)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class Loading:
    """Loop over batches."""

    def __init__(self) -> None:
        self.loader = DataLoader(TensorDataset(torch.arange(24.0).reshape(8, 3)), batch_size=4)

    def __call__(self) -> None:
        for (batch,) in self.loader:
            (batch * 2).relu_()


def with_handler(raise_late: Callable[[int, FrameType | None], None], run: Callable[[], None], delay_s: float) -> None:
    before = signal.signal(signal.SIGALRM, raise_late)
    try:
        signal.setitimer(signal.ITIMER_REAL, delay_s)
        run()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def by_timer(kind: type[BaseException], run: Callable[[], None], delay_s: float) -> None:
    def handler(*_: object) -> None:
        raise kind

    with_handler(handler, run, delay_s)


def by_quiet_handler(kind: type[BaseException], run: Callable[[], None], delay_s: float) -> None:
    def handler(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        raise kind

    with_handler(handler, run, delay_s)


def by_decorator(kind: type[BaseException], run: Callable[[], None], delay_s: float) -> None:
    """Call `run` under a decorator that raises `kind` in it after `delay_s` seconds, as timeout libraries do."""

    def timeout(seconds: float) -> Callable[[Callable[[], None]], Callable[[], None]]:
        def decorate(function: Callable[[], None]) -> Callable[[], None]:
            @functools.wraps(function)
            def wrapped() -> None:
                def handler(signum: int, frame: FrameType | None) -> None:
                    raise_error(kind)

                with_handler(handler, function, seconds)

            return wrapped

        return decorate

    timeout(delay_s)(run)()


def raise_error(kind: type[BaseException]) -> None:
    raise kind


def by_interrupt(kind: type[BaseException], run: Callable[[], None], delay_s: float) -> None:
    timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    run()


def by_thread(kind: type[BaseException], run: Callable[[], None], delay_s: float) -> None:
    set_error = ctypes.pythonapi.PyThreadState_SetAsyncExc
    arguments = ctypes.c_ulong(threading.get_ident()), ctypes.py_object(kind)
    timer = threading.Timer(delay_s, set_error, arguments)
    timer.start()
    run()


SOURCES = {
    "timer": by_timer,
    "handler without arguments": by_quiet_handler,
    "decorator": by_decorator,
    "Ctrl-C": by_interrupt,
    "another thread": by_thread,
}


def with_contexts(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its contexts, the exceptions during whose handling it was raised."""
    while error is not None:
        yield error
        error = error.__context__


def interrupt(work: Callable[[], None], source: str, kind: type[BaseException], delay_s: float) -> str:
    """Call `work` in a loop until an exception of class `kind`, raised after `delay_s` seconds, interrupts it.

    Return a description of what happened instead, or "" if exactly this exception arrived.

    source : name of the way to raise it, a key of `SOURCES`
    """
    instead, unraisable = "nothing came", list[type[BaseException]]()

    def loop() -> None:
        end = monotonic() + SWALLOWED_S
        while monotonic() < end and not unraisable:
            work()

    before, sys.unraisablehook = sys.unraisablehook, lambda found: unraisable.append(found.exc_type)
    try:
        SOURCES[source](kind, loop, delay_s)
    except BaseException as error:
        # code that it interrupts may fail in its own handler: `Thread.start` does if the thread has ended by then
        if any(type(item) is kind for item in with_contexts(error)):
            return ""
        traceback.print_exc()
        instead = f"{type(error).__name__} was raised"
    finally:
        sys.unraisablehook = before
        # torch's own `no_grad` leaves gradients off when it is interrupted, also without a capture
        torch.set_grad_enabled(True)
    # Python only reports an exception in a finalizer or in the callback of a weak reference
    if unraisable == [kind]:
        return ""
    return ", ".join([instead, *(f"{item.__name__} was reported" for item in unraisable)])


def check(mode: str, exceptions: int, seed: int, folder: Path) -> list[str]:
    """Interrupt loops under a capture `exceptions` times; return descriptions of the errors.

    mode : settings of the capture, a key of `MODES`
    """
    draw = random.Random(seed)
    path = folder / f"{mode.replace(' ', '-')}.jsonl"
    counting, arrived, lost = Counting(), 0, Counter[str]()
    works = {"operators": operators, "training": Trainer(), "loading": Loading()}
    for work in works.values():
        # torch swallows what interrupts the imports of a first step
        work()
    with counting, Capture(path, force=True, **MODES[mode]) as capture:
        for number in range(exceptions):
            name, work = list(works.items())[number % len(works)]
            source = list(SOURCES)[number // len(works) % len(SOURCES)]
            kind = KeyboardInterrupt if source == "Ctrl-C" else draw.choice(KINDS)
            instead = interrupt(work, source, kind, draw.random() * DELAY_S)
            if instead:
                lost[f"{kind.__name__} by {source} in {name}: {instead}"] += 1
            else:
                arrived += 1
        if capture.keeps_last:
            capture.dump()
    problems = [f"{mode}: {count} times lost: {what}" for what, count in lost.items()]
    if capture.problem is not None:
        problems.append(f"{mode}: {capture.problem}")
    findings = validate(path).findings
    problems += [f"{mode}: {item.message}" for item in findings[:5]]
    kept = len(load(path).calls) + capture.dropped
    # an exception may come between the capture's hook and the counting one
    if not capture.keeps_last and not counting.calls <= kept <= counting.calls + exceptions:
        problems.append(f"{mode}: {counting.calls} calls ran, {kept} are recorded or counted as lost")
    print(f"{mode}: {arrived} of {exceptions} arrived, {counting.calls} calls, {capture.dropped} lost")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exceptions", type=int, default=1000, help="exceptions in each mode of capture")
    parser.add_argument("--mode", choices=MODES, action="append", help="modes of capture")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for mode in args.mode or MODES:
            problems += check(mode, args.exceptions, args.seed, Path(folder))
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
