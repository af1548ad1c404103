"""Several traces in one run: which these are, and how they are replayed in turn."""

from opgrip.replay.command.several.targets import Target, targets_of

__all__ = ["Target", "targets_of"]
