"""What runs in a process that somebody attaches to: it starts the agent there, and nothing else."""

from __future__ import annotations


def begin() -> None:
    """Start the agent; never raises into the thread that runs this."""
    import sys

    try:
        from pathlib import Path

        from opgrip.capture.on_demand.agent import start_agent
        from opgrip.capture.on_demand.names import DEFAULT
        from opgrip.capture.on_demand.settings import Settings

        name = Path(sys.argv[0]).stem if getattr(sys, "argv", None) and sys.argv[0] else "python"
        start_agent(Settings(name, str(Path(DEFAULT).absolute())))
    except Exception as error:
        print(f"opgrip: no agent was started here: {' '.join(str(error).split())}", file=sys.stderr)


if __name__ in ("__main__", "<opgrip>"):
    begin()
