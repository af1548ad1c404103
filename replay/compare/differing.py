"""What two runs were made with that is not the same, said before any of their times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opgrip.replay.outcome import Results
from opgrip.replay.results.results import SETTINGS, UNUSUAL

OF_HEADER = ("device", "trace_hash", "seed")
OF_ENVIRONMENT = ("machine", "system", "processor", "processors", "governor", "max_mhz", "threads", "python")
UNKNOWN = "not known"
OF_RUN = {
    "dtype": "as recorded",
    "tune": "none",
    "threads": "as recorded",
    "values": "",
    "streams": "",
    "cache": "",
    "method": "",
}
"""Columns by which two runs may differ as a whole and still be compared, and what stands for an empty cell."""
SAID = ("seed", "exec_mode")
"""Settings that a field of the header or a column says too."""


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


def run_columns(base: Results, new: Results) -> list[str]:
    """Return the columns that a run has only one value of for each case, so that two runs can differ in them."""
    columns: list[str] = []
    for name in ("device", *OF_RUN):
        if all(_count(run, [*columns, name]) == _count(run, columns) for run in (base, new)):
            columns.append(name)
    return columns


def _count(run: Results, columns: Sequence[str]) -> int:
    """Return how many rows there are to tell apart without some columns."""
    return len({row.identity_without(*columns) for row in run})


def _settings(base: Results, new: Results) -> Iterator[tuple[str, str, str]]:
    """Yield how rows were run, where it is the same in a whole run, and the options that no column says."""
    for name, usual in OF_RUN.items():
        if base.rows and new.rows:
            yield name, _values(base, name) or usual, _values(new, name) or usual
    old, now = _given(base.header), _given(new.header)
    yield from _members(old, now)


def _given(header: Mapping[str, Any]) -> dict[str, str]:
    """Return the options that a header says were given; those of earlier versions as one text."""
    earlier = header.get(UNUSUAL)
    given = {str(name): str(value) for name, value in _part(header, SETTINGS).items() if name not in SAID}
    return given | ({"options": ", ".join(map(str, earlier))} if earlier else {})


def _values(side: Results, name: str) -> str:
    return ", ".join(sorted({str(value) for row in side.rows if (value := getattr(row, name)) not in (None, "")}))


def _members(old: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What stands in either."""
    for name in sorted({*old, *now}):
        yield name, str(old.get(name, "-")), str(now.get(name, "-"))


def _part(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = facts.get(name)
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return UNKNOWN if value is None else str(value)
