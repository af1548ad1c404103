"""What the header of a distilled trace says: the cases that it was made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIELD = "distilled"
"""Field of the header of a distilled trace. Readers that do not know it ignore it."""


def chosen_numbers(header: Mapping[str, Any]) -> range | None:
    """Return the numbers of the signatures that a distilled trace is of, or None if it is not distilled.

    Other signatures of such a trace are of calls that precede these.
    """
    field = header.get(FIELD)
    keys = field.get("keys") if isinstance(field, dict) else None
    return range(len(keys)) if isinstance(keys, list) else None
