"""Verdicts on the results of a call, and the tolerances within which results count as correct."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from opgrip.cli.option_types import tolerance
from opgrip.cli.options import RUN, option, titled

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ResultDifference:
    """The wrong elements of one result, compared with the reference's result.

    place : the result, such as `output 1`
    """

    place: str
    count: int
    size: int
    max_abs: float
    max_rel: float
    at: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = f", at {[*self.at]}" if self.at else ""
        by = f"{self.max_abs:.2g} (rel {self.max_rel:.2g})"
        return f"{self.place}: {self.count:,} of {self.size:,} elements differ, by {by} at most{where}"

    def joined(self, other: ResultDifference) -> ResultDifference:
        larger = max(self, other, key=lambda item: (item.max_abs, item.count))
        return replace(larger, max_rel=max(self.max_rel, other.max_rel))


@dataclass(frozen=True, slots=True)
class ResultVerdict:
    """The verdict on results: whether they are correct, and how far they are from the reference's results.

    right_abs, right_rel : largest errors of correct results; None if unknown
    """

    right_abs: float | None = None
    right_rel: float | None = None
    faults: tuple[ResultDifference | str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        return not self.faults

    @property
    def max_abs(self) -> float | None:
        return self.right_abs if self.right else max((item.max_abs for item in self._differences), default=None)

    @property
    def max_rel(self) -> float | None:
        return self.right_rel if self.right else max((item.max_rel for item in self._differences), default=None)

    @property
    def reason(self) -> str | None:
        return "; ".join(map(str, self.faults)) or None

    @property
    def _differences(self) -> list[ResultDifference]:
        return [item for item in self.faults if isinstance(item, ResultDifference)]


class WrongResultError(Exception):
    """Raised if a candidate returns wrong results or manipulates its measurement."""


def wrong(reason: str) -> ResultVerdict:
    return ResultVerdict(faults=(reason,))


def joined(verdicts: Iterable[ResultVerdict]) -> ResultVerdict:
    parts = list(verdicts)
    faults: dict[str, ResultDifference | str] = {}
    for fault in (fault for part in parts for fault in part.faults):
        name = fault if isinstance(fault, str) else fault.place
        before = faults.get(name)
        faults[name] = (
            fault.joined(before)
            if isinstance(fault, ResultDifference) and isinstance(before, ResultDifference)
            else fault
        )
    return ResultVerdict(
        max((part.right_abs for part in parts if part.right_abs is not None), default=None),
        max((part.right_rel for part in parts if part.right_rel is not None), default=None),
        tuple(faults.values()),
        tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


EXACT = (0.0, 0.0)
# relative and absolute tolerance by dtype, as in the documentation of `torch.testing.assert_close`
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


@titled("execution")
@dataclass(frozen=True, slots=True)
class Tolerance:
    """Tolerance of results: |actual - reference| <= atol + rtol * |reference|."""

    rtol: float | None = option(
        None,
        "relative tolerance when results are compared (default: by dtype)",
        parse=tolerance,
        metavar="X",
        only=("single cases",),
        role=RUN,
    )
    atol: float | None = option(
        None,
        "absolute tolerance when results are compared (default: by dtype)",
        parse=tolerance,
        metavar="X",
        only=("single cases",),
        role=RUN,
    )

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return (relative tolerance, absolute tolerance) for results of a dtype."""
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
