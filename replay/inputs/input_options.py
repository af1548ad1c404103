"""What cases run on."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from opgrip.cli.command import seed
from opgrip.cli.option_types import floating_dtype
from opgrip.cli.options import CASES, IDENTITY, RUN, option, titled
from opgrip.cli.suggestions import did_you_mean
from opgrip.replay.inputs.values import KINDS, RECORDED
from opgrip.replay.operators.admission import TRUSTED_EXTENSIONS


def value_kinds(text: str) -> tuple[str, ...]:
    """Some of `KINDS`, with commas between them."""
    kinds = tuple(dict.fromkeys(text.split(",")))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        hint = did_you_mean(unknown[0], KINDS, f"choose from {', '.join(KINDS)}")
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no way to draw values: {hint}")
    return kinds


@titled("what they run on")
@dataclass(frozen=True, slots=True)
class InputOptions:
    """Where arguments are, and what they hold."""

    device: str | None = option(
        None,
        "where to replay, such as cuda:0 (default: where it was captured); cuda:0,cuda:1 spreads the cases over equal "
        "devices",
        role=IDENTITY,
    )
    dtype: str | None = option(
        None,
        "of floating-point tensors, such as bfloat16",
        parse=floating_dtype,
        only=("single cases",),
        role=IDENTITY,
    )
    values: tuple[str, ...] = option(
        (RECORDED,),
        "draw values as recorded, or random or zeros as tools do that know shapes alone; several are run in turn "
        "and compared with the first (default: recorded)",
        parse=value_kinds,
        metavar="KIND,...",
        only=("single cases", "traces"),
        role=IDENTITY,
    )
    seed: int = option(
        0,
        "of the values that are drawn (default: %(default)s)",
        parse=seed,
        role=RUN,
    )
    extension: tuple[str, ...] = option(
        (),
        "a module whose extension functions and Triton kernels the trace may call, besides "
        f"{', '.join(TRUSTED_EXTENSIONS)}; can be repeated",
        repeated=True,
        metavar="MODULE",
        role=CASES,
    )

    @property
    def devices(self) -> tuple[str, ...]:
        """The names in `device`."""
        return () if self.device is None else tuple(self.device.split(","))

    @property
    def is_spread(self) -> bool:
        """Whether the cases are spread over several devices."""
        return len(self.devices) > 1

    @property
    def extensions(self) -> tuple[str, ...]:
        """Extension modules whose functions may be called."""
        return (*TRUSTED_EXTENSIONS, *self.extension)
