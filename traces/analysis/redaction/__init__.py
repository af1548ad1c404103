"""Redaction: removal of a program's names, paths, texts, numbers and values from a trace."""

from opgrip.traces.analysis.redaction.policy import KINDS, Policy, check_kept, salt_of
from opgrip.traces.analysis.redaction.redaction import Redaction

__all__ = ["KINDS", "Policy", "Redaction", "check_kept", "salt_of"]
