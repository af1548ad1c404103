"""Files that other tools wrote, which are not part of this project."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import ROOT

from opgrip.traces import Trace
from opgrip.traces.foreign import Losses, formats

DATA = ROOT.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="files of other tools are not beside this checkout")


def data_files(pattern: str) -> list[Path]:
    """Those that match a pattern below the folder, in the order of their names; none where there is none."""
    return sorted(DATA.glob(pattern))


def write_as(name: str, trace: Trace, path: Path) -> Losses:
    """Write a trace as a file of a format; what it lacks."""
    losses = Losses()
    format_ = formats.get(name)
    assert format_ is not None
    assert format_.write is not None
    with path.open("wb") as file:
        format_.write(trace, file, losses)
    return losses
