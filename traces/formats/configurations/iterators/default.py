"""The iterator of what has no macros."""

from __future__ import annotations

from typing import Any

from opgrip.traces.formats.configurations.iterators.iterator import iterators
from opgrip.traces.formats.configurations.value_choices import Choices, Listed


@iterators.register("DefaultConfigIterator")
def expand(entry: dict[str, Any]) -> Choices:
    """The entry as it is."""
    return Listed([entry])
