"""Recording of the operators that a program runs, as a trace."""

from typing import TYPE_CHECKING

from opgrip.cli.plugins import lazy_names

if TYPE_CHECKING:
    from opgrip.capture.command.model_steps import capture as capture
    from opgrip.capture.on_demand.agent import step as step
    from opgrip.capture.on_demand.agent import trigger as trigger
    from opgrip.capture.session.capture import Capture as Capture
    from opgrip.capture.session.schedule import Schedule as Schedule

__all__ = ["Capture", "Schedule", "capture", "step", "trigger"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Capture": "opgrip.capture.session.capture",
        "Schedule": "opgrip.capture.session.schedule",
        "capture": "opgrip.capture.command.model_steps",
        "step": "opgrip.capture.on_demand.agent",
        "trigger": "opgrip.capture.on_demand.agent",
    },
)
