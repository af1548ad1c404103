"""Options of timing: cache state, method, and number of runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from opgrip.cli.command import InvalidValueError, not_negative, positive
from opgrip.cli.option_types import duration, names, percent, seconds
from opgrip.cli.options import EFFORT, IDENTITY, RUN, option, titled
from opgrip.errors import UserError
from opgrip.replay.cases.selection import PROGRAM

WARM, COLD = "warm", "cold"
CACHES = (PROGRAM, WARM, COLD)
DISCRETE, CONTINUOUS, EVENTS, GRAPH = "discrete", "continuous", "events", "graph"
METHODS = (DISCRETE, CONTINUOUS, EVENTS, GRAPH)
SEQUENCE = "sequence"  # timing method of calls that were timed within a step replay
ON_DEVICE = (EVENTS, GRAPH)


def cache_states(text: str) -> tuple[str, ...]:
    states = names(text)
    unknown = [state for state in states if state not in CACHES]
    if unknown:
        raise InvalidValueError(f"{unknown[0]!r} is not one of {', '.join(CACHES)}")
    return states


@titled("timing")
@dataclass(frozen=True, slots=True)
class TimingOptions:
    backward: bool = option(
        False,
        "also time the backward pass of each forward call",
        only=("single cases",),
        role=IDENTITY,
        column="direction",
        common=True,
    )
    exec_mode: str | None = option(
        None,
        "how to time: each run separately (discrete), many runs at once (continuous), with the device's "
        "events (events), or as a CUDA graph (graph) (default: events on an accelerator, else discrete)",
        choices=METHODS,
        only=("single cases",),
        role=RUN,
        common=True,
    )
    cache: tuple[str, ...] = option(
        (),
        "cache state before each run: program (after the calls that precede it in the program), warm "
        "(after a run of the same call) or cold; several states are run in turn and compared with the "
        "first (default: program; warm for samples and with --exec-mode continuous)",
        parse=cache_states,
        metavar="STATE,...",
        only=("single cases",),
        role=IDENTITY,
        common=True,
    )

    clock_warmup: float = option(
        0.5,
        "keep a GPU busy for this time before the first case, to raise its clocks (default: %(default)s)",
        parse=duration,
        metavar="SECONDS",
        only=("single cases",),
        role=EFFORT,
    )

    @property
    def caches(self) -> tuple[str, ...]:
        return self.cache or ((WARM,) if self.exec_mode == CONTINUOUS else (PROGRAM,))

    @property
    def by_clock_of_device(self) -> bool:
        return self.exec_mode in ON_DEVICE

    def with_method(self, usual: str) -> TimingOptions:
        return self if self.exec_mode else replace(self, exec_mode=usual)

    def check(self) -> None:
        if self.exec_mode == CONTINUOUS and self.caches != (WARM,):
            others = ",".join(self.caches)
            raise UserError(
                f"--exec-mode continuous keeps the caches warm, which contradicts --cache {others}",
                "remove one of them",
            )
        if self.exec_mode == GRAPH and self.backward:
            raise UserError(
                "--exec-mode graph cannot capture a backward pass, which runs on the stream of its forward pass",
                "time it with --exec-mode events",
            )

    def check_device(self, device: str) -> None:
        if self.by_clock_of_device and device == "cpu":
            raise UserError(
                f"--exec-mode {self.exec_mode} needs the clock of a GPU, which {device} does not have",
                "use --exec-mode discrete",
            )


# minimum number of parts into which the time budget is divided, and shortest part in s, if the whole is not shorter
FEWEST_PARTS, LEAST_PART_S = 25, 0.25


@titled("timing")
@dataclass(frozen=True, slots=True)
class Effort:
    precision: float = option(
        0.05,
        "run each case until the interquartile range of its times is at most this share of their median "
        "(default: %(default)s)",
        parse=percent,
        metavar="SHARE",
        role=EFFORT,
        common=True,
    )
    budget_s: float = option(
        75.0,
        "stop timing after about this time; each case gets an equal part, at most a 25th and at least 0.25 s "
        "(default: %(default)s)",
        word="budget",
        parse=seconds,
        metavar="SECONDS",
        only=("single cases",),
        role=EFFORT,
    )
    iterations: int | None = option(
        None,
        "run exactly N timed iterations per case, instead of --precision and --budget",
        parse=positive,
        role=EFFORT,
        common=True,
    )
    repeats: int = option(
        1,
        "replay all cases N times in new processes, so that opgrip compare knows how much replays vary "
        "(default: %(default)s)",
        parse=positive,
        only=("single cases",),
        role=EFFORT,
        common=True,
    )
    warmup: int = option(
        2,
        "untimed runs of each case, or of the step with --sequence, whose dry run counts as two (default: %(default)s)",
        parse=not_negative,
        role=EFFORT,
    )

    def of_one(self, rows: int) -> Effort:
        """Return the effort for one of several rows, with its part of the time budget."""
        part_s = self.budget_s / max(rows * self.repeats, FEWEST_PARTS)
        return replace(self, budget_s=max(part_s, min(self.budget_s, LEAST_PART_S)))
