"""What a machine gives at most: bandwidth by level of memory, arithmetic by dtype, launches; kept in a file."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from opgrip.cli.output_files import whole_file
from opgrip.platform.machine import cache_folder, processor

FORM = 2
"""Of the file; one of another form is as good as none."""
TF32 = "tf32"
"""Names the rate of products of float32 that a GPU may round to 10 bits before."""
FLOAT8 = "float8"
"""What the names of all its forms begin with."""


@dataclass(frozen=True, slots=True)
class Level:
    """A cache, or the memory behind all of them.

    Attributes
    ----------
    name : `L1`, `L2`, `L3`, `memory`
    size : bytes of one such cache; None for the memory
    sharing : processors that share it
    bandwidth : GB/s of a copy, read and written bytes together, by number of threads
    """

    name: str
    size: int | None
    sharing: int
    bandwidth: dict[int, float]

    def holds(self, size: int, threads: int) -> bool:
        """Whether so many bytes fit that so many threads share out among them."""
        return self.size is None or size <= self.size * max(1, threads // self.sharing)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """A machine's ceilings.

    Attributes
    ----------
    machine : name of the processor or GPU, and what else they depend on
    device : `cpu`, `cuda`
    threads : the largest number that was measured
    levels : from the nearest to the memory
    rates : by dtype and number of threads, the rate of a product of matrices in Gflop/s
    launch_us : time of an operator on one element: what launching and allocating take
    dispatch_us : time of an operator that makes a view
    torch, time : version, and when it was measured
    """

    machine: tuple[str, ...]
    device: str
    threads: int
    levels: tuple[Level, ...]
    rates: dict[str, dict[int, float]]
    launch_us: float
    dispatch_us: float
    torch: str
    time: str

    def level(self, size: int, threads: int, cold: bool) -> Level:
        """The nearest level that holds so many bytes; with cold caches the memory."""
        return next(level for level in self.levels if level.size is None or (not cold and level.holds(size, threads)))

    def bandwidth(self, level: Level, threads: int) -> float:
        """GB/s of a level."""
        return _between(level.bandwidth, threads)

    def rate(self, dtype: str | None, threads: int) -> float | None:
        """Gflop/s in a dtype, or in `TF32`; those of float32 where it was not measured; None where neither was.

        The forms of float8 are as quick as each other, and nothing else is as quick as they are.
        """
        rates = self.rates.get(dtype or "")
        if rates is None and (dtype or "").startswith(FLOAT8):
            rates = next((rates for name, rates in self.rates.items() if name.startswith(FLOAT8)), None)
        elif rates is None:
            rates = self.rates.get("float32")
        return None if not rates else _between(rates, threads)


def ceilings_path(device: str) -> Path:
    """Where the ceilings of this machine are kept."""
    depends = [*processor(device), str(_processors()), torch.__version__, str(FORM)]
    key = hashlib.blake2b("\n".join(depends).encode(), digest_size=8).hexdigest()
    return cache_folder() / "machine" / f"{torch.device(device).type}-{key}.json"


def read_cached_ceilings(device: str) -> Ceilings | None:
    """The ceilings that were measured before; None where there are none, or their file is damaged."""
    try:
        return from_json(json.loads(ceilings_path(device).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep(ceilings: Ceilings, device: str) -> Path:
    """Write the ceilings where they are found again, and say where that is."""
    path = ceilings_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(ceilings, path, force=True)
    return path


def write(ceilings: Ceilings, path: Path, force: bool) -> None:
    """Write the ceilings to a file."""
    with whole_file(path, force) as file:
        file.write(json.dumps(to_json(ceilings), indent=1).encode() + b"\n")


def to_json(ceilings: Ceilings) -> dict[str, Any]:
    """The ceilings as JSON has them."""
    return {"form": FORM, **asdict(ceilings)}


def from_json(fields: dict[str, Any]) -> Ceilings:
    """The ceilings of a file.

    Raises
    ------
    ValueError, KeyError, TypeError, AttributeError : where they are not there
    """
    if fields["form"] != FORM:
        raise ValueError(f"form {fields['form']}")
    levels = tuple(
        Level(item["name"], item["size"], item["sharing"], _by_threads(item["bandwidth"])) for item in fields["levels"]
    )
    if not levels or levels[-1].size is not None:
        raise ValueError("the last level is not the memory")
    return Ceilings(
        machine=tuple(fields["machine"]),
        device=fields["device"],
        threads=int(fields["threads"]),
        levels=levels,
        rates={dtype: _by_threads(rates) for dtype, rates in fields["rates"].items()},
        launch_us=float(fields["launch_us"]),
        dispatch_us=float(fields["dispatch_us"]),
        torch=fields["torch"],
        time=fields["time"],
    )


def _by_threads(values: dict[str, float]) -> dict[int, float]:
    value_by_threads = {int(threads): float(value) for threads, value in values.items()}
    if not value_by_threads or min(value_by_threads.values()) <= 0:
        raise ValueError("a ceiling is missing")
    return value_by_threads


def _between(measured: dict[int, float], threads: int) -> float:
    """The value for a number of threads, on a line between those that were measured."""
    points = sorted(measured.items())
    below = [point for point in points if point[0] <= threads] or points[:1]
    above = [point for point in points if point[0] >= threads] or points[-1:]
    (low, first), (high, last) = below[-1], above[0]
    return first if low == high else first + (last - first) * (threads - low) / (high - low)


def _processors() -> int:
    return len(os.sched_getaffinity(0))
