"""What a score is of: the way in which cases were run, the machine that ran them, and the file they are from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opgrip.replay.outcome import Results
from opgrip.replay.results.results import Result
from opgrip.replay.scoring.baselines import Baseline, about_of

CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured.

    Attributes
    ----------
    way : the mode, and what else was not as usual: `compile, 2 threads`
    machine : its processor, its device, its torch and its threads, in a few words
    device : the name of it
    torch : its version
    trace, trace_hash : what was replayed; of several traces the hash of theirs
    """

    way: str
    machine: str = ""
    device: str = ""
    torch: str = ""
    trace: str = ""
    trace_hash: str = ""


def measured_of(results: Results, way: str, rows: Iterable[Result]) -> Measured:
    """What the rows of a way are of, as the header of their results says it, which may be a stranger's."""
    about = about_of(results)
    if any(row.threads is not None for row in rows):
        # the way names them
        about.pop("threads", None)
    words = (str(results.header.get(name) or "") for name in ("device", "torch", "trace", "trace_hash"))
    return Measured(way, Baseline(about).machine, *words)


def way_of(row: Result, unusual: Sequence[str]) -> str:
    """How a row was run, in words: a device that is not the processor, and what all its run's rows have, last."""
    device = "" if row.device == CPU else row.device
    return ", ".join(filter(None, (row.mode, device, row.variant, *unusual)))
