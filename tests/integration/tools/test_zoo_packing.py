"""Tests of the form in which traces of the zoo ship."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import SHIPPED_TRACES

from opgrip.traces import load
from opgrip.traces.analysis.differences import compare_traces
from opgrip.traces.zoo import ZooTrace
from opgrip.zoo.making import command_of, pack, short_quantiles

NUMBERS = st.floats(-1e30, 1e30, allow_nan=False)


@given(st.lists(NUMBERS, min_size=2, max_size=30).map(sorted))
def test_shortened_quantiles_keep_order_ends_and_equality(quantiles: list[float]) -> None:
    shortened = short_quantiles(quantiles)
    assert shortened == sorted(shortened)
    assert (shortened[0], shortened[-1]) == (quantiles[0], quantiles[-1])
    same = [one == other for one, other in pairwise(quantiles)]
    assert same == [one == other for one, other in pairwise(shortened)]
    assert all(abs(one - other) <= 1e-3 * abs(other) for one, other in zip(shortened, quantiles, strict=True))


def test_quantiles_are_rounded() -> None:
    assert short_quantiles([1.23456789, 2.3456789, 3.456789]) == [1.23456789, 2.346, 3.456789]


@pytest.mark.slow
def test_packed_trace_has_equal_calls_and_values_and_its_recipe(tmp_path: Path) -> None:
    path = SHIPPED_TRACES[0]
    trace = ZooTrace("m", "predict", "mmdet", "two-stage", ["--model", "m.py"])
    packed = pack(path, trace, tmp_path / "m.predict.jsonl.zst")
    assert command_of(packed) == ["opcapture", "--model", "m.py"]
    difference = compare_traces(load(path), load(packed), ("plain", "packed"))
    assert difference.changed == []
    assert [name for name, *_ in difference.facts] == ["command"]
    assert packed.stat().st_size < path.stat().st_size / 6


def test_file_that_is_not_a_trace_has_no_command(tmp_path: Path) -> None:
    for content in (b"", b"{}\n", b"[]\n", b"\x28\xb5\x2f\xfd"):
        (tmp_path / "t.jsonl").write_bytes(content)
        (tmp_path / "t.jsonl.zst").write_bytes(content)
        assert command_of(tmp_path / "t.jsonl") is None
        assert command_of(tmp_path / "t.jsonl.zst") is None
