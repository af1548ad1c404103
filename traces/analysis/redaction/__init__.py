"""Redaction of traces: removal of the program's names, paths, texts, numbers and values."""

from opgrip.traces.analysis.redaction.policy import KINDS, Policy, check_kept, salt_of
from opgrip.traces.analysis.redaction.redaction import Redaction

__all__ = ["KINDS", "Policy", "Redaction", "check_kept", "salt_of"]
