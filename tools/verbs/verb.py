"""What a verb is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from opgrip.traces.registry import Registry


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of the `opgrip` command.

    Attributes
    ----------
    summary, examples : for its help
    prepare : adds its options to a parser
    run : does it, and gives the exit status
    """

    summary: str
    examples: str
    prepare: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


verbs: Registry[Verb] = Registry("opgrip.tools.verbs", "opgrip.verbs")
"""Verbs by name, which may begin with a group: `trace info`, `longtail`."""
