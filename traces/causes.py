"""Why something of torch failed, in few words where the cause is a common one."""

from __future__ import annotations

import re

_ALLOCATED = re.compile(r"tried to allocate (\d[\d.]*) ?(bytes|[KMGT]iB)", re.IGNORECASE)
_DRIVER = re.compile(r"driver on your system is too old \(found version (\d+)")
_DEVICES = re.compile(r"Expected one of ([\w, ]+) device type at start of device string")
_COMMON = {
    "Torch not compiled with CUDA enabled": "this torch was built without CUDA",
    "Found no NVIDIA driver": "this machine has no NVIDIA driver",
    "No CUDA GPUs are available": "this machine has no GPU that CUDA finds",
    "invalid device ordinal": "this machine has no GPU of that number",
    "Invalid device string": "devices are named as in cpu or cuda:0",
}
"""What a message contains, and what it comes to."""


def cause_of(error: BaseException) -> str:
    """What made torch, or what it calls, fail: too little memory, a device that is not there; else the whole error.

    It is one line, and belongs at the end of a message: an error that is not known here can be long.
    """
    text = " ".join(str(error).split())
    name = type(error).__name__
    if isinstance(error, MemoryError) or "OutOfMemoryError" in name or "out of memory" in text or _is_refused(text):
        return _memory(text)
    if match := _DRIVER.search(text):
        version = int(match[1])
        return f"the NVIDIA driver, of CUDA {version // 1000}.{version % 1000 // 10}, is too old for this torch"
    if match := _DEVICES.search(text):
        return f"torch knows {match[1]}"
    for part, cause in _COMMON.items():
        if part in text:
            return cause
    return f"{name}: {text}" if text else name


def _is_refused(text: str) -> bool:
    """Whether a message is that of an allocator on the CPU that got no memory."""
    return "DefaultCPUAllocator" in text or "not enough memory" in text


def _memory(text: str) -> str:
    place = "the GPU" if "CUDA" in text or "GPU" in text else "this machine"
    match = _ALLOCATED.search(text)
    if match is None:
        return f"{place} has not enough memory"
    size = f"{int(match[1]) / 1e9:,.1f} GB" if match[2].lower() == "bytes" else f"{match[1]} {match[2]}"
    return f"{place} has not enough memory for {size} more"
