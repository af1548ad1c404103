"""Tests of plots of a trace's time: every call is in a bar, and untrusted names stay text."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from opgrip.traces import Trace, UserError, load

EVIL = r"</text><script>x</script>$\frac{1}{0}$&\ud800"


@pytest.fixture(scope="module")
def trace(tiny_trace: Path) -> Trace:
    return load(tiny_trace)


def bars(figure: Any) -> dict[str, float]:
    (axes,) = figure.axes
    lengths: dict[str, float] = dict.fromkeys((label.get_text() for label in axes.get_yticklabels()), 0.0)
    for container in axes.containers:
        for name, part in zip(lengths, container.patches, strict=True):
            lengths[name] += part.get_width()
    return lengths


def test_bars_equal_the_summary(trace: Trace) -> None:
    table = trace.summary().head(20)
    table = table[table["share"] >= 0.001]
    expected = dict(zip(table["op"], table["time_us"], strict=True))
    assert bars(trace.plot()) == pytest.approx(expected)
    assert list(bars(trace.plot())) == list(expected)


def test_invalid_grouping_and_empty_trace_are_reported_in_one_line(trace: Trace) -> None:
    with pytest.raises(UserError, match="a picture cannot be grouped by nosuch: choose op, module"):
        trace.plot(by="nosuch")
    with pytest.raises(UserError, match="the trace has no calls"):
        replace(trace, calls=trace.calls.iloc[:0]).plot()
    assert "<img" not in replace(trace, calls=trace.calls.iloc[:0])._repr_html_()


def test_names_of_an_untrusted_trace_remain_text(tiny_trace: Path, tmp_path: Path) -> None:
    text = tiny_trace.read_text()
    for name in ("aten.convolution.default", "forward"):
        text = text.replace(f'"{name}"', json.dumps(f"{EVIL}{name}"))
    (tmp_path / "t.jsonl").write_text(text)
    evil = load(tmp_path / "t.jsonl")
    evil.header["model"] = {"name": EVIL}
    for by in ("op", "module"):
        file = io.BytesIO()
        evil.plot(by=by, parts="phase").savefig(file, format="svg")
        texts = ["".join(item.itertext()) for item in ElementTree.fromstring(file.getvalue()).iter() if item.text]
        assert any("<script>x</script>" in text for text in texts)
        assert "<script" not in file.getvalue().decode()
    page = evil._repr_html_()
    page.encode()
    assert "&lt;script&gt;x" in page
    assert ("<script" in page, page.count("<img")) == (False, 1)


def test_notebook_shows_only_a_table_without_matplotlib(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = trace._repr_html_()
    assert ("<img" in page, page.count("<tr")) == (False, min(len(trace.summary()), 20) + 1)
    with pytest.raises(UserError, match=r"matplotlib is not installed: pip install 'matplotlib>=3\.8'"):
        trace.plot()
