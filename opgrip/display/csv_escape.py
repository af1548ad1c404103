"""Text that a spreadsheet takes for a formula: in a .csv an apostrophe before it makes it text."""

from __future__ import annotations

import re

_FORMULA = re.compile(r"'*(?:[=@\t\r]|[+-](?!\d+(?:\.\d+)?$))")


def quoted(text: str) -> str:
    """A text as a cell of a .csv."""
    return f"'{text}" if _FORMULA.match(text) else text


def unquoted(text: str) -> str:
    """What `quoted` was given."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text
