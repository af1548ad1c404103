"""Which modes cases run under."""

from __future__ import annotations

from dataclasses import dataclass

from opgrip.cli.option_types import names
from opgrip.cli.options import IDENTITY, RUN, option, titled
from opgrip.errors import UserError
from opgrip.replay.modes.mode import EAGER, Tuning, find_mode, modes, runs_graphs


@titled("how they are run")
@dataclass(frozen=True, slots=True)
class ModeOptions:
    """The modes, and the one that the others are compared with."""

    mode: tuple[str, ...] = option(
        (EAGER,),
        lambda: f"{', '.join(modes.names())}; compile:NAME for another backend of dynamo (default: {EAGER})",
        parse=names,
        metavar="NAME,...",
        role=IDENTITY,
    )
    reference: str = option(
        EAGER,
        "what results and times are compared with (default: %(default)s)",
        metavar="MODE",
        only=("single cases",),
        role=RUN,
    )

    @property
    def all_names(self) -> tuple[str, ...]:
        """All modes that are run, the reference first."""
        return tuple(dict.fromkeys((self.reference, *self.mode)))

    def check(self, tuning: Tuning, in_graph: bool = False) -> None:
        """Raise `UserError` where a mode does not exist, or lacks a package, or cannot do what it is asked to.

        Parameters
        ----------
        in_graph : whether runs are captured as CUDA graphs to be timed
        """
        graphs = [name for name in self.all_names if runs_graphs(name)]
        if in_graph and graphs:
            raise UserError(
                f"--exec-mode graph captures what {graphs[0]} runs, which is a CUDA graph already",
                "time it with --exec-mode events",
            )
        tuners = [tuner for name in self.all_names for tuner in find_mode(name)[0].tuners]
        if tuning.tuner is not None and not tuning.trials:
            raise UserError("--tuner is for a search", "say how many programs to try: --tune 64")
        if tuning.trials and not tuners:
            raise UserError("none of these modes can search for better programs", "leave --tune out, or add tvm")
        if tuning.tuner is not None and tuning.tuner not in tuners:
            raise UserError(f"there is no tuner {tuning.tuner!r}", f"there are {', '.join(tuners)}")
