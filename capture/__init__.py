"""Watches a program, and writes what it runs to a trace."""

from typing import TYPE_CHECKING

from opgrip.cli.lazy_packages import load_on_demand

if TYPE_CHECKING:
    from opgrip.capture.call import capture as capture
    from opgrip.capture.capture import Capture as Capture
    from opgrip.capture.on_demand.marks import step as step
    from opgrip.capture.on_demand.trigger import trigger as trigger
    from opgrip.capture.schedule import Schedule as Schedule

__all__ = ["Capture", "Schedule", "capture", "step", "trigger"]

PUBLIC = {
    "Capture": "opgrip.capture.capture",
    "Schedule": "opgrip.capture.schedule",
    "capture": "opgrip.capture.call",
    "step": "opgrip.capture.on_demand.marks",
    "trigger": "opgrip.capture.on_demand.trigger",
}
load_on_demand(__name__)
