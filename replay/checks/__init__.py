"""Comparison of the results of a mode with the results of eager, the reference."""

from typing import TYPE_CHECKING

from opgrip.cli.plugins import lazy_names

if TYPE_CHECKING:
    from opgrip.replay.checks.reference import Reference as Reference
    from opgrip.replay.checks.reference import observe as observe
    from opgrip.replay.checks.verdicts import ResultVerdict as ResultVerdict
    from opgrip.replay.checks.verdicts import Tolerance as Tolerance

__all__ = ["Reference", "ResultVerdict", "Tolerance", "observe"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Reference": "opgrip.replay.checks.reference",
        "Tolerance": "opgrip.replay.checks.verdicts",
        "ResultVerdict": "opgrip.replay.checks.verdicts",
        "observe": "opgrip.replay.checks.reference",
    },
)
