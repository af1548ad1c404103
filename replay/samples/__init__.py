"""Samples as cases: those that ship, by name."""

from opgrip.replay.samples.shipped import SHIPPED, fingerprint, names_samples, sample_cases

__all__ = ["SHIPPED", "fingerprint", "names_samples", "sample_cases"]
