"""Whether what a mode gave is what the reference, eager, gave."""

from opgrip.replay.checks.reference import Reference, observe
from opgrip.replay.checks.tolerances import Tolerance
from opgrip.replay.checks.verdicts import Verdict

__all__ = ["Reference", "Tolerance", "Verdict", "observe"]
