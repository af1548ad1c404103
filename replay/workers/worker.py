"""What a process does that cases run in; `python -m opgrip.replay.workers.worker` is one that was not forked.

It is told cases line by line, in JSON, and tells their rows.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from opgrip.platform.machine import lines
from opgrip.replay.operators.devices import DeviceLostError, is_accelerator, limit_device_memory, use_device
from opgrip.replay.results.results import Result
from opgrip.replay.run.measure import measure_cases
from opgrip.replay.run.preparation import prepare
from opgrip.replay.run.settings import Settings
from opgrip.replay.timing.rounds import Announce
from opgrip.replay.workers.job import Job, Loaded
from opgrip.replay.workers.watch import Watch

PR_SET_PDEATHSIG = 1
DEVICE_LOST = 75
"""Exit status of a process whose device serves it no more."""


def serve(loaded: Loaded, watch: Watch, source: int, output: int, cpus: Sequence[int] = ()) -> None:
    """Run the cases that are asked for, until nobody asks any more.

    Parameters
    ----------
    source, output : descriptors of the lines that are read and written
    cpus : that it is bound to; none for those of this process
    """
    watch.mark_idle()
    # the last words of a process that dies shall tell why
    warnings.simplefilter("ignore")
    if cpus:
        os.sched_setaffinity(0, cpus)
    settings = replace(loaded.settings, memory=True)
    use_device(settings.device)
    limit = limit_memory(settings.limits.memory_limit, settings.device)
    settings = replace(settings, limits=replace(settings.limits, memory_limit=limit))
    try:
        _serve(loaded, settings, watch, source, output)
    except DeviceLostError as error:
        end_without_device(error)


def _serve(loaded: Loaded, settings: Settings, watch: Watch, source: int, output: int) -> None:
    process = os.getpid()
    by_number = {case.number: case for case in loaded.cases}
    announce = _guarded(watch.entered)
    for line in os.fdopen(source, "rb"):
        request = json.loads(line)
        if "make" in request:
            number, row = request["make"]
            prepared = prepare(by_number[number], settings, announce, only=row)
            rows_of_cases: Iterable[list[Result]] = [[result for _, result, _ in prepared]]
        else:
            cases = [by_number[number] for number in request["cases"]]
            rows_of_cases = measure_cases(
                cases, settings, loaded.surroundings, announce, request["without"], _by_case(request["known"])
            )
        for rows in rows_of_cases:
            _end_copy(process)
            watch.mark_idle()
            _say(output, {"rows": [row.to_plain() for row in rows]})
        watch.mark_idle()
        _say(output, {"done": True})


def _guarded(announce: Announce) -> Announce:
    """Return what announces a row where code of a case before may have left the working directory, or forked."""
    process = os.getpid()
    try:
        folder = os.getcwd()
    except OSError:
        folder = None

    def announce_here(number: int, row: int) -> None:
        _end_copy(process)
        if folder is not None:
            with suppress(OSError):
                os.chdir(folder)
        announce(number, row)

    return announce_here


def _end_copy(process: int) -> None:
    """End a process that code of a case forked and let go on: its rows would be told twice."""
    if os.getpid() != process:
        os._exit(0)


def _by_case(records: Sequence[tuple[int, int, dict[str, Any]]]) -> dict[int, dict[int, Result]]:
    rows_by_case: dict[int, dict[int, Result]] = {}
    for number, row, result in records:
        rows_by_case.setdefault(number, {})[row] = Result.from_plain(result)
    return rows_by_case


def main() -> int:
    """Serve the process that started this one; its first line is a job."""
    request, output = receive()
    job = Job.from_plain(request["job"])
    serve(job.load(), Watch(request["watch"]), 0, output, job.plan.points.pin)
    return 0


def receive() -> tuple[dict[str, Any], int]:
    """What the process that started this one asks for, and the descriptor that takes the answer."""
    # what extensions print must not stand among our messages
    output = os.dup(1)
    os.dup2(2, 1)
    request: dict[str, Any] = json.loads(_first_line(0))
    if os.getppid() == request["parent"]:
        # else a profiler stands between, which ends this process itself
        end_with_parent()
    return request, output


def end_with_parent() -> None:
    """Have the system end this process with the thread that started it, however that ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_without_device(error: DeviceLostError) -> NoReturn:
    """End this process, which its device serves no more."""
    print(error, file=sys.stderr, flush=True)
    os._exit(DEVICE_LOST)


def limit_memory(limit: int | None, device: str) -> int | None:
    """Let this process take so many bytes beside what it has, on an accelerator of its memory; gives how many.

    Parameters
    ----------
    limit : None for most of what is free on an accelerator; on the CPU for all that there are
    """
    if is_accelerator(device):
        return limit_device_memory(device, limit)
    if limit is None:
        return None
    used = next((int(line.split()[1]) << 10 for line in lines("/proc/self/status") if line.startswith("VmData")), 0)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (used + limit, used + limit))
    return limit


def _first_line(source: int) -> bytes:
    """The next line, and not a byte more: the rest is read by another reader."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(source, 1)
        if not byte:
            break
        line += byte
    return line


def _say(output: int, message: Mapping[str, Any]) -> None:
    text = json.dumps(message).encode() + b"\n"
    while text:
        text = text[os.write(output, text) :]


if __name__ == "__main__":
    sys.exit(main())
