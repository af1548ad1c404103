"""A gripped sample with the calls that were recorded, held against what its code gives."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from opgrip.capture.grip.compare import difference
from opgrip.capture.grip.gripped import GrippedCall
from opgrip.capture.grip.sample_calls import as_it_ran, recorded_calls
from opgrip.traces.io.sample_folder import open_sample


class RecordedSample:
    """A sample that `grip` wrote.

    Parameters
    ----------
    folder : of the sample, whose code is loaded, which runs it: for folders that one trusts

    Raises
    ------
    UserError : where there is no sample, or its code cannot be loaded
    """

    def __init__(self, folder: str | Path) -> None:
        self._opened = open_sample(Path(folder))

    @cached_property
    def calls(self) -> list[GrippedCall]:
        """The calls that were recorded, with live arguments and results.

        Raises
        ------
        UserError : where the files are not there
        """
        return recorded_calls(self._opened.folder, self._opened.classes)

    def difference(self, call: GrippedCall) -> str | None:
        """Run a call again, and say where it differs from what was recorded, in one line; None where it does not."""
        with as_it_ran(call):
            results = self._opened.function(*call.args, **call.kwargs)
        line = difference(call.results, results)
        if line is None and call.after is not None:
            line = difference(call.after, (call.args, call.kwargs))
        return line
