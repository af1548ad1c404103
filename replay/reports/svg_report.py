"""Results as a drawing of the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

from opgrip.replay.measuring.results import Result
from opgrip.replay.reports.report import reports
from opgrip.replay.roofline.drawing import draw
from opgrip.traces.ceilings.ceilings import from_json


@reports.register(".svg")
def write_svg(results: Sequence[Result], header: Mapping[str, Any], file: IO[str]) -> None:
    """A dot a row that was timed, under the ceilings that the header has."""
    file.write(draw(results, from_json(header["ceilings"]), header.get("threads", 1), str(header.get("trace", ""))))
