"""Names that a user may have meant by one that there is not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches

MOST = 3
NEAR = 0.8
WILD = "*?[]"


def did_you_mean(word: str, names: Collection[str], otherwise: str = "", form: str = "{}") -> str:
    """`did you mean x or y?` of the names that are much like a word, each in a form; `otherwise` where none is.

    Those that are alike by less than `NEAR` of the nearest are none that was meant.
    """
    lower = {name.lower(): name for name in names}
    close = get_close_matches(word.lower(), lower, MOST, 0.6)
    ratios = [SequenceMatcher(None, name, word.lower()).ratio() for name in close]
    close = [form.format(lower[name]) for name, ratio in zip(close, ratios, strict=True) if ratio >= NEAR * ratios[0]]
    return f"did you mean {listed(close)}?" if close else otherwise


def listed(names: Sequence[str]) -> str:
    """`x, y or z`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def nearest(pattern: str, names: Iterable[str], most: int = MOST) -> list[str]:
    """The names that a pattern with wildcards comes nearest to, the nearest first."""
    word = pattern.lower().strip(WILD)
    return sorted(names, key=lambda name: (-_likeness(word, name.lower()), name))[:most]


def _likeness(word: str, name: str) -> float:
    """How much of a word is in the beginning of a name, or of the part of it after a dot."""
    starts = [0, *(place + 1 for place, character in enumerate(name) if character in ".:/")]
    return max(SequenceMatcher(None, word, name[start : start + len(word)]).ratio() for start in starts)
