"""Samples as cases: those that ship, and those that were gripped."""

from opgrip.replay.samples.gripped import gripped_calls
from opgrip.replay.samples.shipped import SHIPPED, find_samples
from opgrip.replay.samples.targets import fingerprint, names_samples, sample_cases

__all__ = ["SHIPPED", "find_samples", "fingerprint", "gripped_calls", "names_samples", "sample_cases"]
