"""A side of a comparison in a small file: what recordings of a day called, which themselves were not kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opgrip.cli.output_files import whole_file
from opgrip.errors import UserError
from opgrip.traces.analysis.differences.side import Cases, Side
from opgrip.traces.codec.json_values import check_finite, elapsed_ns, integer, text
from opgrip.traces.schema.arguments import FormatError

SUFFIX = ".shapes.json"
VERSION = 1
MOST_BYTES = 32 << 20
"""A hundred thousand signatures, of which each byte takes twenty in memory."""


def write_day(side: Side, path: Path) -> None:
    """Write a side, in the place of what is there."""
    form = {
        "opgrip_shapes": VERSION,
        "header": side.header,
        "traces": side.traces,
        "steps": side.steps,
        "signatures": [
            {
                "key": key,
                "op": cases.op,
                "call": cases.call,
                "calls": cases.count,
                "time_ns": round(cases.time_ns),
                "median_us": None if cases.median_us is None else round(cases.median_us, 3),
            }
            for key, cases in side.cases.items()
        ],
    }
    with whole_file(path, force=True) as file:
        file.write(json.dumps(form, indent=1, default=str).encode() + b"\n")


def read_day(path: Path) -> Side:
    """The side that `write_day` wrote.

    Raises
    ------
    UserError : for another file, or one that somebody has damaged
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise FormatError("it is too large")
        form = json.loads(path.read_bytes())
        if not isinstance(form, dict) or form.get("opgrip_shapes") != VERSION:
            raise FormatError(f"it is no file of shapes of version {VERSION}")
        check_finite(form)
        return _side(form)
    except OSError as error:
        raise UserError(f"{path} cannot be read", str(error.strerror or error).lower()) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is no file that --new-only wrote", str(error)[:200]) from error


def _side(form: Mapping[str, Any]) -> Side:
    side = Side(header=dict(form["header"]), traces=elapsed_ns(form["traces"]))
    side.steps = None if form["steps"] is None else integer(form["steps"])
    for item in form["signatures"]:
        cases = Cases(
            text(item["op"]), text(item["call"]), elapsed_ns(item["calls"]), float(elapsed_ns(item["time_ns"]))
        )
        if item["median_us"] is not None:
            cases.times_us = [(float(item["median_us"]), cases.count)]
        side.cases[text(item["key"])] = cases
        side.calls += cases.count
        side.time_ns += cases.time_ns
    return side
