"""Modes of another package, each of which fails in a different way."""

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from opgrip.replay.modes import Program, Task, mode
from opgrip.traces.schema.arguments import map_leaves

OFF = 1e-3


def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Task], Program]:
    def make(task: Task) -> Program:
        def function(*args: Any, **kwargs: Any) -> Any:
            results = task.function(*args, **kwargs)
            return map_leaves(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, results)

        return Program(function)

    return make


@mode("planted-same", ahead=False)
def same(task: Task) -> Program:
    return Program(task.function, note="as it is")


@mode("planted-keeps")
def keeps(task: Task) -> Program:
    assert task.store is not None
    kept = task.store / "program"
    if kept.exists():
        return Program(task.function, note="loaded")
    kept.write_text("made")
    return Program(task.function, note="made")


@mode("planted-searches", ahead=False, argument="variant", arguments=lambda: ("untuned",), tuners=("luck",))
def searches(task: Task) -> Program:
    return Program(task.function, note=f"{task.tuning.trials} trials")


@mode("planted-needy", needs=("no_such_package.part",), extra="needy")
def needy(task: Task) -> Program:
    raise AssertionError("it lacks its package")


@mode("planted-refuses")
def refuses(task: Task) -> Program:
    raise ValueError("line one\nline two")


@mode("planted-crowded")
def crowded(task: Task) -> Program:
    """Return a program that first runs out of memory, as with concurrent compilations, and wraps the error as
    compilers do.
    """
    tried = Path(os.environ["OPGRIP_CACHE"]) / "crowded"
    if tried.exists():
        return Program(task.function)
    tried.touch()
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    except torch.OutOfMemoryError as error:
        raise RuntimeError("backend='inductor' raised") from error


@mode("planted-hangs")
def hangs(task: Task) -> Program:
    time.sleep(3600)
    return Program(task.function)


@mode("planted-crashes")
def crashes(task: Task) -> Program:
    ctypes.string_at(0)
    return Program(task.function)


@mode("planted-crashes-later")
def crashes_later(task: Task) -> Program:
    left = [4]

    def function(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            ctypes.string_at(0)
        return task.function(*args, **kwargs)

    return Program(function)


@mode("planted-raises")
def raises(task: Task) -> Program:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("it does not run")

    return Program(function)


@mode("planted-forgets")
def forgets(task: Task) -> Program:
    def function(first: Any, *args: Any, **kwargs: Any) -> Any:
        return task.function(first.clone() if isinstance(first, torch.Tensor) else first, *args, **kwargs)

    return Program(function)


def one_off(result: torch.Tensor) -> torch.Tensor:
    flat = result.reshape(-1).clone()
    flat[-1] += OFF if result.is_floating_point() else 1
    return flat.view(result.shape)


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "planted-scaled": lambda result: result * (1 + OFF),
    "planted-one-off": one_off,
    "planted-turned": lambda result: result.flip(0),
    "planted-cut": lambda result: result[:-1],
    "planted-wide": lambda result: result.double(),
    "planted-nan": lambda result: result / 0 * 0,
}
for name, change in WRONG.items():
    mode(name)(changed(change))
