"""Samples as cases: those that ship, and those that were gripped."""

from opgrip.replay.cases.samples.gripped import gripped_calls
from opgrip.replay.cases.samples.shipped import SHIPPED, find_samples
from opgrip.replay.cases.samples.targets import PREFIX, fingerprint, names_samples, sample_cases

__all__ = ["PREFIX", "SHIPPED", "find_samples", "fingerprint", "gripped_calls", "names_samples", "sample_cases"]
