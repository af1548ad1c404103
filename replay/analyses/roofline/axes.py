"""Logarithmic axes of a drawing, and the text of its elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from xml.sax.saxutils import escape, quoteattr

UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))


@dataclass(frozen=True, slots=True)
class Axis:
    """Values on a line of the drawing, each decade as long as every other.

    Attributes
    ----------
    low, high : values at the ends, both above 0
    start, end : places of the ends, in pixels
    """

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """Where a value is; those beyond the ends are at the ends."""
        inside = min(max(value, self.low), self.high)
        share = log10(inside / self.low) / log10(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def decades(self) -> Iterator[float]:
        """Powers of ten between the ends."""
        return (10.0**power for power in range(ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9) + 1))


def axis_over(values: Sequence[float], start: float, end: float) -> Axis:
    """An axis of whole decades that has all values on it."""
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    return Axis(10.0**low, 10.0 ** max(high, low + 1), start, end)


def element(name: str, content: str | None = None, **attributes: object) -> str:
    """An element with its attributes; an underscore in their names stands for a hyphen."""
    names = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    attribute_text = "".join(f" {key}={quoteattr(_text(value))}" for key, value in names.items())
    return f"<{name}{attribute_text}/>" if content is None else f"<{name}{attribute_text}>{content}</{name}>"


def words(text: str, x: float, y: float, **attributes: object) -> str:
    """A line of text."""
    return element("text", escape(text), x=x, y=y, **attributes)


def short(value: float, unit: str = "") -> str:
    """A number in three digits with the prefix of its unit."""
    size, prefix = next(((size, prefix) for size, prefix in UNITS if value >= size), UNITS[-1])
    return f"{value / size:.3g} {prefix}{unit}".strip()


def _text(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
