"""Tries what may end the process: in a fork of it, which is started again behind what ended it."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from opgrip.errors import one_line

TIMEOUT_S = 10.0
"""Of one trial."""
ENDS = "it ends the process"
HANGS = "it takes too long"


def try_all(trials: Sequence[Callable[[], Any]]) -> Iterator[tuple[Any, str]]:
    """What each trial gives, as far as JSON can hold it, and why it gives nothing; empty where it does.

    Call it before this process has started an accelerator, or is watched: a fork inherits both.
    """
    done = 0
    while done < len(trials):
        for outcome in _try_from(trials, done):
            done += 1
            yield outcome


def _try_from(trials: Sequence[Callable[[], Any]], first: int) -> Iterator[tuple[Any, str]]:
    """Outcomes of the trials up to one that ends the process, itself included."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _run_child(trials[first:], writer)
    os.close(writer)
    remaining = len(trials) - first
    try:
        with os.fdopen(reader, "rb", buffering=0) as results:
            rest = b""
            while remaining:
                is_ready, _, _ = select.select([results], [], [], TIMEOUT_S)
                chunk = results.read(1 << 16) if is_ready else b""
                if not chunk:
                    yield None, ENDS if is_ready else HANGS
                    return
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    remaining -= 1
                    value, reason = json.loads(line)
                    yield value, reason
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _run_child(trials: Sequence[Callable[[], Any]], writer: int) -> None:
    try:
        # a pool of threads does not live on in a fork
        torch.set_num_threads(1)
        # what operators print of their end is no message of ours
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        for trial in trials:
            try:
                line = json.dumps([trial(), ""])
            except Exception as error:
                line = json.dumps([None, one_line(error)])
            os.write(writer, f"{line}\n".encode())
    finally:
        os._exit(0)
