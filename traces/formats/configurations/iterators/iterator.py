"""What an iterator of configurations is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opgrip.cli.plugins import Registry
from opgrip.traces.formats.configurations.value_choices import Choices

Expand = Callable[[dict[str, Any]], Choices]
"""All that one entry of a `build` or `input` section stands for, as such entries without macros.

Such an entry has `args`, a list of arguments, and `kwargs`, arguments by name; each is an object with its `type`.
Raises `ValueError` where the entry cannot be expanded.
"""

iterators: Registry[Expand] = Registry("opgrip.traces.formats.configurations.iterators", "opgrip.iterators")
"""Iterators by the names that stand in files."""
