"""Text of a stranger in Markdown: no markup, no HTML, no break of a line or of a table's cell."""

from __future__ import annotations

import re

from opgrip.cli.command import printable

# an underscore within a word is none of Markdown's, and stays readable
_MARKUP = re.compile(r"[\\|`*<>\[\]]|(?<!\w)_|_(?!\w)|(?<!^)~|^[#+-](?=[\s#]|$)")


def literal(text: str) -> str:
    """A text that Markdown shows as it is."""
    return _MARKUP.sub(lambda match: f"\\{match[0]}", printable(text))
