"""What two runs were made with that is not the same, said before any of their times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from opgrip.replay.outcome import Results

OF_HEADER = ("device", "trace_hash", "seed")
OF_ENVIRONMENT = ("machine", "system", "processor", "processors", "governor", "max_mhz", "threads", "python")
UNKNOWN = "not known"


def what_differs(base: Results, new: Results) -> list[tuple[str, str, str]]:
    """Name, and what each run has of it; what neither says is the same."""
    return [
        (name.replace("_", " ") if name.islower() else name, old, now)
        for name, old, now in _facts(base.header, new.header)
        if old != now and not (UNKNOWN in (old, now) and name != "device")
    ] + [(name, old, now) for name, old, now in _settings(base, new) if old != now]


def _facts(base: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name in OF_HEADER:
        yield name, _text(base.get(name)), _text(new.get(name))
    old, now = _part(base, "environment"), _part(new, "environment")
    for name in OF_ENVIRONMENT:
        yield name, _text(old.get(name)), _text(now.get(name))
    if old and now:
        # a run that set no variable has none in its environment
        yield from _members(_part(old, "variables"), _part(now, "variables"))
    libraries = [_part(_part(header, "accelerator"), "libraries") for header in (base, new)]
    for first, second in ((_part(old, "versions"), _part(now, "versions")), libraries):
        if first and second:
            yield from _members(first, second)


def _settings(base: Results, new: Results) -> Iterator[tuple[str, str, str]]:
    """How rows were timed."""
    for name in ("method", "cache"):
        yield name, _values(base, name), _values(new, name)


def _values(side: Results, name: str) -> str:
    return ", ".join(sorted({str(value) for row in side.rows if (value := getattr(row, name)) is not None}))


def _members(old: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What stands in either."""
    for name in sorted({*old, *now}):
        yield name, str(old.get(name, "-")), str(now.get(name, "-"))


def _part(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = facts.get(name)
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return UNKNOWN if value is None else str(value)
