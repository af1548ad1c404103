"""Where cases run, and the processors that one worker has."""

from __future__ import annotations

import argparse
import fcntl
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from opgrip.cli.command import not_negative, positive
from opgrip.cli.options import CASES, EFFORT, RUN, flag_of, option, titled
from opgrip.cli.suggestions import did_you_mean
from opgrip.errors import UserError
from opgrip.replay.workers.engines.engine import engines
from opgrip.replay.workers.shards import Shard
from opgrip.replay.workers.shards import shard as shard_of_text

WAIT_S, POLL_S = 60.0, 0.2
"""For processors that another worker leaves: how long, and how often they are tried."""


class Processors:
    """Processors that this process and those that it starts are bound to, and no other worker of this user.

    Each is a locked file, which the system unlocks when this process has ended, in whatever way.

    Parameters
    ----------
    count : how many; none are taken for 0, and the process may use what it could before

    Attributes
    ----------
    numbers : theirs, ascending

    Raises
    ------
    UserError : where other workers have them
    """

    def __init__(self, count: int, wait_s: float = WAIT_S) -> None:
        self._files: list[int] = []
        self.numbers: Sequence[int] = ()
        if not count:
            return
        usable = sorted(os.sched_getaffinity(0))
        if count > len(usable):
            raise UserError(f"there are {len(usable)} processors here, and not {count}", "give fewer to --processors")
        folder = Path(tempfile.gettempdir()) / f"opgrip-processors-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        end = monotonic() + wait_s
        while not self._take(folder, usable, count):
            if monotonic() > end:
                raise UserError(f"other workers have so many processors that {count} are not free", "give fewer")
            sleep(POLL_S)
        os.sched_setaffinity(0, self.numbers)

    def close(self) -> None:
        """Leave them to others."""
        for file in self._files:
            os.close(file)
        self._files.clear()

    def _take(self, folder: Path, usable: Sequence[int], count: int) -> bool:
        """Take so many, or none."""
        numbers = []
        for number in usable:
            file = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._files.append(file)
                numbers.append(number)
                if len(numbers) == count:
                    self.numbers = numbers
                    return True
                continue
            os.close(file)
        self.close()
        return False


PROCESSES = "processes"


def engine_name(text: str) -> str:
    """The name of an engine."""
    if engines.get(text) is None:
        hint = did_you_mean(text, engines.names(), f"there are {', '.join(engines.names())}")
        raise argparse.ArgumentTypeError(f"there is no engine {text!r}: {hint}")
    return text


@titled("where they run")
@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The machines and processes that share the cases."""

    engine: str = option(
        PROCESSES,
        "what runs the cases: processes of this machine, or ray, workers of a cluster (default: %(default)s)",
        parse=engine_name,
        metavar="NAME",
        only=("single cases",),
        role=EFFORT,
    )
    address: str | None = option(
        None,
        "with --engine ray: of the cluster, such as 10.0.0.1:6379, or auto for that of this machine (default: one that "
        "starts itself here)",
        metavar="HOST:PORT",
        role=EFFORT,
    )
    workers: int | None = option(
        None,
        "with --engine ray: at once at most (default: one a device, or as many as have processors)",
        parse=positive,
        metavar="N",
        role=EFFORT,
    )
    processors: int | None = option(
        None,
        "with --engine ray: that each worker has to itself and is pinned to; 0 for workers that share them, whose "
        "times say nothing (default: all of a machine)",
        parse=not_negative,
        metavar="N",
        role=RUN,
    )
    machine_kind: str | None = option(
        None,
        "with --engine ray: only machines of this kind, of a cluster of several: their times do not mix",
        metavar="GLOB",
        role=CASES,
    )
    shard: Shard | None = option(
        None,
        "only the I-th of N equal parts of the cases, balanced by their time; auto: as torchrun, Slurm or Open MPI "
        "say; {shard} in the name of --output stands for it; opgrip results merge joins them",
        parse=shard_of_text,
        metavar="I/N",
        only=("single cases",),
        role=CASES,
    )

    def check(self, devices: Sequence[str] = (), pin: Sequence[int] = ()) -> None:
        """Raise `UserError` where an option is for another engine.

        Parameters
        ----------
        devices, pin : names of those that are asked for, numbers of processors
        """
        if self.engine != PROCESSES:
            if len(devices) > 1 or any(device.partition(":")[2] not in {"", "0"} for device in devices):
                raise UserError(f"{self.engine} spreads cases over devices by itself", "give --device without a number")
            if pin:
                raise UserError("--pin is for this machine", "give workers their processors by --processors")
            return
        for name in ("address", "workers", "processors", "machine_kind"):
            if getattr(self, name) is not None:
                raise UserError(f"{flag_of(name)} is for workers of a cluster", "add --engine ray")
