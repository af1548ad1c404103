"""`--kind roofline`: operations a second over operations a byte, under the machine's ceilings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opgrip.errors import UserError
from opgrip.replay.plots.plot import Plot, Request, plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(request: Request) -> Figure:
    """The drawing of `opreplay --roofline -o x.svg`, of results that hold the ceilings."""
    from opgrip.replay.analyses.roofline import drawing
    from opgrip.traces.analysis.machine_ceilings import from_json

    (run,) = request.runs.values()
    if "ceilings" not in run.header:
        raise UserError("the results do not hold the machine's limits", "replay with --roofline")
    try:
        ceilings, threads = from_json(run.header["ceilings"]), int(run.header.get("threads", 1))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError("the machine's limits in the results are damaged", "replay with --roofline") from error
    return drawing.draw(run.rows, ceilings, threads, request.title)


plots.register("roofline")(Plot("calls under the machine's ceilings", draw, most=1))
