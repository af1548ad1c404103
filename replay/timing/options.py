"""How runs are timed."""

from __future__ import annotations

from dataclasses import dataclass

from opgrip.replay.timing.caches import CACHES, PROGRAM, WARM
from opgrip.replay.timing.methods import CONTINUOUS, DISCRETE, GRAPH, METHODS, ON_DEVICE
from opgrip.traces.errors import UserError
from opgrip.traces.options import option, titled


@titled("how they are timed")
@dataclass(frozen=True, slots=True)
class TimingOptions:
    """What is timed, and by which clock."""

    backward: bool = option(False, "time the gradients of each forward call too", only=("single cases",))
    exec_mode: str = option(
        DISCRETE,
        "time each run alone, many at once, by a GPU's events, or as a CUDA graph (default: %(default)s)",
        choices=METHODS,
        only=("single cases",),
    )
    cache: str | None = option(
        None,
        "what caches hold before a run: what other calls of the program left, the run before, or nothing "
        "(default: program; warm for samples and with --exec-mode continuous)",
        choices=CACHES,
        only=("single cases",),
    )

    @property
    def caches(self) -> str:
        """What caches hold before a run, where nothing is said too."""
        return self.cache or (WARM if self.exec_mode == CONTINUOUS else PROGRAM)

    @property
    def by_clock_of_device(self) -> bool:
        """Whether runs are timed by the device's own clock, on torch's streams."""
        return self.exec_mode in ON_DEVICE

    def check(self) -> None:
        """Raise `UserError` where they do not go together."""
        if self.exec_mode == CONTINUOUS and self.caches != WARM:
            raise UserError(
                f"--exec-mode continuous runs with warm caches, and --cache {self.caches} with others", "leave one"
            )
        if self.exec_mode == GRAPH and self.backward:
            raise UserError(
                "--exec-mode graph cannot capture a backward, which runs on the stream of its forward",
                "time it with --exec-mode events",
            )

    def check_device(self, device: str) -> None:
        """Raise `UserError` where a way to time runs is not for this device."""
        if self.by_clock_of_device and not device.startswith("cuda"):
            raise UserError(
                f"--exec-mode {self.exec_mode} reads the clock of a GPU, and {device} has none", "use discrete"
            )
