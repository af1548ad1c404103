"""What a check says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether results are right, and how far they are from the reference's.

    Attributes
    ----------
    max_abs, max_rel : largest errors over all outputs and written arguments, `max_rel` over the elements that are not
        zero in the reference; None where there was nothing to subtract, as of random numbers
    reason : in one line, what is not right
    """

    right: bool
    max_abs: float | None = None
    max_rel: float | None = None
    reason: str | None = None


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict of several: right where all are, with the reasons of those that are not."""
    parts = list(verdicts)
    reasons = [part.reason for part in parts if part.reason is not None]
    return Verdict(
        all(part.right for part in parts),
        max((part.max_abs for part in parts if part.max_abs is not None), default=None),
        max((part.max_rel for part in parts if part.max_rel is not None), default=None),
        "; ".join(reasons) or None,
    )
