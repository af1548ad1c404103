"""Runs scaled_3 on the arguments that were recorded, and compares what it gives with what was recorded."""

from pathlib import Path

import pytest
from opgrip.capture.grips.calls import as_it_ran, recorded_calls
from opgrip.capture.grips.compare import difference
from opgrip.capture.grips.folders import open_sample

SAMPLE = open_sample(Path(__file__).parent)


@pytest.mark.parametrize("call", recorded_calls(SAMPLE.folder, SAMPLE.classes))
def test_scaled_3_gives_what_was_recorded(call):
    with as_it_ran(call):
        results = SAMPLE.function(*call.args, **call.kwargs)
    assert difference(call.results, results) is None
    if call.after is not None:
        assert difference(call.after, (call.args, call.kwargs)) is None
