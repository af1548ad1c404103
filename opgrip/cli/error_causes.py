"""Why something failed, in words of ours where the cause is a common one."""

from __future__ import annotations

import re
from collections.abc import Callable

from opgrip.errors import one_line, shortened

MOST = 1000
"""Characters of a message that is not a common one."""


def cause_of(error: BaseException, most: int = MOST) -> str:
    """Why something failed, on one line: a common cause in short, any other by the error's class and message."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        return one_line(error)
    if isinstance(error, MemoryError):
        return f"out of memory: {shortened(text, most)}" if text else "out of memory"
    for pattern, say in _CAUSES:
        match = pattern.search(text)
        if match is not None:
            return say(match)
    return one_line(error, most)


def _of_allocator(match: re.Match[str]) -> str:
    return f"out of memory: {_size(int(match[1]))} were asked for"


def _of_device(match: re.Match[str]) -> str:
    return f"out of memory: {match[1]} were asked for, and {match[3]} of {match[2]} on the GPU are free"


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} PB"


def _driver(match: re.Match[str]) -> str:
    version = int(match[1])
    return f"the NVIDIA driver is too old for this torch: it knows CUDA {version // 1000}.{version % 1000 // 10}"


_CAUSES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), say)
    for pattern, say in (
        (r"can't allocate memory: you tried to allocate (\d+) bytes", _of_allocator),
        (
            r"out of memory.*?allocate ([\d.]+ \w+)\..*capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free",
            _of_device,
        ),
        (r"out of memory|can't allocate memory", lambda match: "out of memory"),
        (r"driver on your system is too old \(found version (\d+)\)", _driver),
        (r"Found no NVIDIA driver", lambda match: "no NVIDIA driver is installed"),
        (r"No CUDA GPUs are available", lambda match: "no GPU is visible"),
        (r"invalid device ordinal", lambda match: "there are fewer GPUs"),
        (r"Torch not compiled with (\w+) enabled", lambda match: f"this torch is built without {match[1]}"),
        (
            r"Could not run '([\w:.]+)' with arguments from the '(\w+)' backend",
            lambda match: f"{match[1]} has no kernel for {match[2]}",
        ),
        (r"No module named 'torch\.(\w+)'", lambda match: f"this torch is built without {match[1].upper()}"),
        # what follows tells how to debug CUDA
        (r"(CUDA error: .*?) CUDA kernel errors might be", lambda match: match[1]),
    )
)
