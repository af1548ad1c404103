"""Variants: the run configurations of a case, each a row of the results."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from opgrip.cli.option_types import counts, cpus
from opgrip.cli.options import IDENTITY, RUN, option, titled
from opgrip.replay.inputs.input_options import RECORDED

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True)
class Point:
    """The values of the swept options: threads, batch scale and streams.

    threads : threads of an operator; None to use the recorded number
    batch : factor on the recorded batch size
    streams : number of cases that run concurrently, on threads or on streams of a device
    """

    threads: int | None = None
    batch: int = 1
    streams: int = 1


@titled("device and inputs")
@dataclass(frozen=True, slots=True)
class PointOptions:
    """Options that select the points at which cases are run; each combination is one row."""

    threads: tuple[int, ...] = option(
        (),
        "threads per operator (default: as captured)",
        parse=counts,
        metavar="N,...",
        only=("single cases",),
        role=IDENTITY,
        common=True,
    )
    batch_scale: tuple[int, ...] = option(
        (1,),
        "multiples of the recorded batch size (default: 1)",
        parse=counts,
        metavar="N,...",
        only=("single cases", "traces"),
        role=IDENTITY,
        common=True,
    )
    streams: tuple[int, ...] = option(
        (1,),
        "number of cases to run at once, on threads or on CUDA streams (default: 1)",
        parse=counts,
        metavar="N,...",
        only=("single cases",),
        role=IDENTITY,
    )
    pin: tuple[int, ...] = option(
        (),
        "run only on these processors, such as 0,2-3",
        parse=cpus,
        metavar="CPUS",
        only=("single cases",),
        role=RUN,
    )

    def __iter__(self) -> Iterator[Point]:
        for threads, batch, streams in product(self.threads or (None,), self.batch_scale, self.streams):
            yield Point(threads, batch, streams)

    @property
    def notes(self) -> Sequence[str]:
        processors = len(self.pin or os.sched_getaffinity(0))
        most = max(self.threads, default=0)
        if most <= processors:
            return ()
        there_are = f"{processors} processors" if processors > 1 else "one processor"
        return (f"{most} threads share {there_are}: this process may use no more",)

    @property
    def is_sweep(self) -> bool:
        return any(len(points) > 1 for points in (self.threads, self.batch_scale, self.streams))


@dataclass(frozen=True, slots=True)
class Variant:
    """One run configuration of a case.

    number : index among the case's variants
    direction : `forward`, or `backward` for the gradients
    mode : name, with the argument after a colon
    cache : state of the caches before a run, if the variants differ in it
    """

    number: int
    values: str
    direction: str
    mode: str
    point: Point = Point()
    cache: str | None = None

    @property
    def label(self) -> str:
        """Words that distinguish the variant: `compile backward random`, `eager 2 threads`."""
        usual = (FORWARD, RECORDED)
        words = [self.mode, *(word for word in (self.direction, self.values) if word not in usual)]
        if self.point.threads is not None:
            words.append(f"{self.point.threads} threads")
        if self.point.batch != 1:
            words.append(f"batch x{self.point.batch}")
        if self.point.streams != 1:
            words.append(f"{self.point.streams} streams")
        if self.cache is not None:
            words.append(f"{self.cache} cache")
        return " ".join(words)
