"""Options for the device and values of a case's inputs, and the kinds of values: recorded, random or zeros."""

from __future__ import annotations

from dataclasses import dataclass

from opgrip.cli.command import InvalidValueError, did_you_mean, seed
from opgrip.cli.option_types import floating_dtype
from opgrip.cli.options import CASES, IDENTITY, RUN, option, titled
from opgrip.replay.operators.admission import ALL_OF_TORCH, TRUSTED_EXTENSIONS, extension_of

RECORDED, RANDOM, ZEROS = "recorded", "random", "zeros"
KINDS = (RECORDED, RANDOM, ZEROS)
# kind of values for calls that are run without being measured: recorded values, but large float tensors repeat a piece
REPEATED = "repeated"


def value_kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(dict.fromkeys(text.split(",")))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        hint = did_you_mean(unknown[0], KINDS, f"choose from {', '.join(KINDS)}")
        raise InvalidValueError(f"unknown kind of values: {unknown[0]!r}: {hint}")
    return kinds


@titled("device and inputs")
@dataclass(frozen=True, slots=True)
class InputOptions:
    device: str | None = option(
        None,
        "device to replay on, such as cuda:0; cuda:0,cuda:1 spreads the cases over equal devices "
        "(default: where the calls were captured)",
        role=IDENTITY,
        common=True,
    )
    dtype: str | None = option(
        None,
        "dtype to cast floating-point tensors to, such as bfloat16",
        parse=floating_dtype,
        only=("single cases",),
        role=IDENTITY,
        common=True,
    )
    values: tuple[str, ...] = option(
        (RECORDED,),
        "how to generate tensor values: recorded (like the recorded ones), random or zeros; several kinds "
        "are run in turn and compared with the first (default: recorded)",
        parse=value_kinds,
        metavar="KIND,...",
        only=("single cases", "traces"),
        role=IDENTITY,
        common=True,
    )
    seed: int = option(0, "random seed for generated values (default: %(default)s)", parse=seed, role=RUN)
    extension: tuple[str, ...] = option(
        (),
        "module or file to import, whose operators, functions and Triton kernels the trace may call, in addition to "
        f"{', '.join(TRUSTED_EXTENSIONS)}; can be repeated",
        repeated=True,
        parse=extension_of,
        metavar="MODULE|FILE",
        role=CASES,
    )
    trust: bool = option(
        False,
        "also run private operators of torch that were not reviewed for accesses outside their tensors, for traces "
        "that you trust; --sandbox runs them too",
        role=CASES,
    )

    @property
    def devices(self) -> tuple[str, ...]:
        return () if self.device is None else tuple(self.device.split(","))

    @property
    def is_spread(self) -> bool:
        return len(self.devices) > 1

    @property
    def extensions(self) -> tuple[str, ...]:
        return (*TRUSTED_EXTENSIONS, *self.extension, *((ALL_OF_TORCH,) if self.trust else ()))
