"""Watches a program, and writes what it runs to a trace."""

from opgrip.capture.call import capture
from opgrip.capture.capture import Capture
from opgrip.capture.schedule import Schedule

__all__ = ["Capture", "Schedule", "capture"]
