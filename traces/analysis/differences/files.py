"""Differences of traces as files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from opgrip.cli.command import printable
from opgrip.cli.output_files import whole_file
from opgrip.errors import UserError
from opgrip.traces.analysis.differences.compare import KINDS, Difference, Row


def check_form(path: Path) -> None:
    """Raise `UserError` where no difference is written to a file of that name."""
    if path.suffix not in _FORMS:
        raise UserError(f"{path} is neither {' nor '.join(_FORMS)}", "name one of these")


def write_difference(difference: Difference, path: Path, force: bool) -> None:
    """Write all rows as JSON, or those that differ as a table of Markdown."""
    with whole_file(path, force) as file:
        file.writelines(f"{line}\n".encode("utf-8", "replace") for line in _FORMS[path.suffix](difference))


def values_text(row: Row) -> str:
    """What changed of a row's values, in words."""
    return ", ".join(
        f"tensor {place} {name} {_number(one)} → {_number(other)}" for place, name, one, other in row.values
    )


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _as_json(difference: Difference) -> Iterator[str]:
    yield json.dumps(difference.as_json(), indent=1)


def _as_markdown(difference: Difference) -> Iterator[str]:
    before, after = map(_cell, difference.names)
    yield f"# {before} → {after}"
    yield ""
    yield ", ".join(f"{kind} {len(difference.of_kind(kind))}" for kind in KINDS)
    yield ""
    for name, one, other in difference.facts:
        yield f"- {name}: {_cell(one)} → {_cell(other)}"
    yield ""
    if difference.operators:
        yield "| operator | share of time | share of calls |"
        yield "| --- | ---: | ---: |"
        for item in difference.operators:
            shares, calls = (f"{one:.1%} → {other:.1%}" for one, other in (item.shares, item.call_shares))
            yield f"| `{_cell(item.op)}` | {shares} | {calls} |"
        yield ""
    yield "| what | calls | share | call | values |"
    yield "| --- | ---: | ---: | --- | --- |"
    for row in difference.changed:
        counts = f"{row.counts[0]:,} → {row.counts[1]:,}"
        shares = f"{row.shares[0]:.1%} → {row.shares[1]:.1%}"
        yield f"| {', '.join(row.kinds)} | {counts} | {shares} | `{_cell(row.call)}` | {_cell(values_text(row))} |"


def _cell(value: Any) -> str:
    """Text that a trace holds, as a cell that it cannot leave."""
    text = printable(value if isinstance(value, str) else json.dumps(value, default=str))
    return text.replace("|", "\\|").replace("`", "'").replace("<", "&lt;")


_FORMS: dict[str, Callable[[Difference], Iterator[str]]] = {".json": _as_json, ".md": _as_markdown}
