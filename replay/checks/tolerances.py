"""How far apart two numbers may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from opgrip.cli.option_types import tolerance
from opgrip.cli.options import RUN, option, titled

if TYPE_CHECKING:
    import torch

EXACT = (0.0, 0.0)
TOLERANCES: dict[str, tuple[float, float]] = {
    "float64": (1e-7, 1e-7),
    "float32": (1.3e-6, 1e-5),
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "complex128": (1e-7, 1e-7),
    "complex64": (1.3e-6, 1e-5),
    "complex32": (1e-3, 1e-5),
    "quint8": (1.3e-6, 1e-5),
    "qint8": (1.3e-6, 1e-5),
    "qint32": (1.3e-6, 1e-5),
    "quint4x2": (1.3e-6, 1e-5),
    "quint2x4": (1.3e-6, 1e-5),
}
"""Relative and absolute tolerance by a dtype's name.

Source: the table in the documentation of `torch.testing.assert_close`.
"""


@titled("how they are run")
@dataclass(frozen=True, slots=True)
class Tolerance:
    """What counts as equal: |actual - reference| <= atol + rtol * |reference|.

    It is of no account for whole numbers and bools, which are equal or not.
    """

    rtol: float | None = option(
        None,
        "relative tolerance of results (default: by dtype)",
        parse=tolerance,
        metavar="X",
        only=("single cases",),
        role=RUN,
    )
    atol: float | None = option(
        None,
        "absolute tolerance of results (default: by dtype)",
        parse=tolerance,
        metavar="X",
        only=("single cases",),
        role=RUN,
    )

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        """The relative and the absolute tolerance of a dtype's numbers.

        A float of 8 bits or fewer may be the next one, which is what a tie that is rounded the other way gives.
        """
        import torch

        name = str(dtype).removeprefix("torch.")
        if name in TOLERANCES:
            rtol, atol = TOLERANCES[name]
        elif dtype.is_floating_point and dtype.itemsize == 1:
            finfo = torch.finfo(dtype)
            rtol, atol = finfo.eps, finfo.smallest_normal * finfo.eps
        else:
            return EXACT
        return (rtol if self.rtol is None else self.rtol), (atol if self.atol is None else self.atol)
