"""Samples as cases: those that ship, by name."""

from opgrip.replay.samples.shipped import SHIPPED, find_samples, fingerprint, names_samples, sample_cases

__all__ = ["SHIPPED", "find_samples", "fingerprint", "names_samples", "sample_cases"]
