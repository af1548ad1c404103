"""Starts the agent of a process with all that its settings ask for."""

from __future__ import annotations

import sys

from opgrip.capture.on_demand.agent import Agent, start_agent
from opgrip.capture.on_demand.settings import Settings
from opgrip.errors import UserError


def start(settings: Settings) -> Agent:
    """The agent of this process, which listens to its signal, and records by itself where that is asked for.

    Raises
    ------
    UserError : where it cannot have a socket or a thread
    """
    agent = start_agent(settings)
    if settings.signal is not None:
        from opgrip.capture.on_demand.trigger import listen_to, signal_of

        try:
            listen_to(signal_of(settings.signal))
        except UserError as error:
            print(f"opgrip: {error}", file=sys.stderr)
    if settings.every_s is not None:
        from opgrip.capture.on_demand.sampling import Sampler

        Sampler(agent).start()
    return agent
