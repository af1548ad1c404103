"""Watches a program, and writes what it runs to a trace."""

from opgrip.capture.capture import Capture

__all__ = ["Capture"]
