"""Results as a drawing of the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

from opgrip.display.figures import write_figure
from opgrip.errors import UserError
from opgrip.replay.analyses.roofline.drawing import draw
from opgrip.replay.reports.report import report
from opgrip.replay.results.results import Result
from opgrip.traces.analysis.machine_ceilings import from_json


@report(".svg", needs="roofline", binary=True, package=("matplotlib", "plot"))
def write_svg(results: Sequence[Result], header: Mapping[str, Any], file: IO[bytes]) -> None:
    """A dot a row that was timed, under the ceilings that the header has."""
    if "ceilings" not in header:
        raise UserError("the rows were not held against the machine's limits", "replay with --roofline")
    ceilings, threads = from_json(header["ceilings"]), header.get("threads", 1)
    write_figure(lambda: draw(results, ceilings, threads, str(header.get("trace", ""))), "svg", file)
