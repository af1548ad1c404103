"""Tests of flight recordings of a private capture: every file is redacted, also after the tables were reset."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from opgrip.capture import Capture
from opgrip.capture.writing import flight_recorder
from opgrip.traces import load
from opgrip.traces.analysis.validation import validate
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.schema.arguments import numbers_of
from opgrip.traces.schema.records import Signature, Values

CARD = 4111111111111111


class SecretNet(nn.Module):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        chosen = torch.arange(50.0)[words] + torch.tensor([CARD])
        with torch.profiler.record_function("SECRET-label"):
            return chosen.sum()


class SecretError(Exception):
    """Error whose name and message belong to the program."""


def check_redacted(path: Path) -> None:
    """Check that a file is complete and consistent, and reveals nothing about the program."""
    text = path.read_text()
    assert "secret" not in text.lower()
    assert str(CARD)[:6] not in text
    assert validate(path).findings == []
    records = list(TraceReader(path))
    assert not [record for record in records if isinstance(record, Values)]
    signatures = [record for record in records if isinstance(record, Signature)]
    assert {number for record in signatures for number in numbers_of((record.args, record.kwargs))} == {None}


@pytest.mark.parametrize("write_ahead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_last_calls_of_a_private_capture_are_redacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_ahead: bool
) -> None:
    monkeypatch.setattr(flight_recorder, "MOST_OF_GENERATION", dict.fromkeys(flight_recorder.MOST_OF_GENERATION, 20))
    model = SecretNet()
    capture = Capture(tmp_path / "t.jsonl", last=40, private=True, write_ahead=write_ahead, stack_depth=3)
    with pytest.raises(SecretError), capture:
        for size in range(1, 41):
            # each call has a new signature, with values similar to an earlier call's or new ones
            model(torch.tensor([7, size % 3, size] * size))
            assert capture._flusher is not None
            capture._flusher.flush()
            if size == 20:
                assert capture.dump("SECRET request") is not None
            for part in tmp_path.iterdir():
                assert b"secret" not in part.read_bytes().lower()
        assert capture._recorder.generations.current > 3
        assert not capture._recorder.lost.dropped
        raise SecretError("SECRET")
    assert capture.failure is None
    assert len(capture.dumps) == 2
    for path in capture.dumps:
        check_redacted(path)
    trace = load(capture.dumps[1], partial=False)
    assert len(trace.calls) == 40
    assert trace.end is not None
    assert trace.header["flight"]["before"] == trace.end.before > 0
    assert trace.header["redacted"]


def test_private_dump_names_only_signals_and_builtin_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="SECRET"), Capture(tmp_path / "t.jsonl", last=40, private=True) as capture:
        SecretNet()(torch.tensor([7, 3]))
        capture.dump("SIGTERM")
        SecretNet()(torch.tensor([7, 3]))
        raise ValueError("SECRET")
    reasons = [load(path).header["flight"]["reason"] for path in capture.dumps]
    assert reasons == ["SIGTERM", "ValueError"]
