"""What is said of a recording that is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opgrip.cli.command import counted


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """Lines on what was recorded, where it is, and what is missing."""
    if result.get("problem"):
        return [f"there is no trace: {result['problem']}"]
    if not result.get("file"):
        return ["there is no trace: no operator was called in the steps"]
    parts = [
        counted(result["steps"], "step"),
        f"{counted(result['calls'], 'call')} of {counted(result['signatures'], 'signature')}",
        f"{result['bytes'] / 1000:,.0f} kB",
    ]
    lines = [f"{', '.join(parts)}, to {result['file']}"]
    if result.get("cut"):
        cut = counted(result["cut"], "step")
        lines.append(f"{cut} had not ended, and the trace has what was called until then")
    if result.get("dropped"):
        lines.append(f"{counted(result['dropped'], 'call')} could not be recorded")
    if result.get("limit"):
        lines.append(f"the recording ended at the limit of {result['limit']}")
    return [*lines, *result.get("notes", ())]
