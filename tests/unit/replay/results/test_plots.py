"""Plots of results and traces: each kind shows its data, and untrusted text is never interpreted as markup."""

import io
import json
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from made_runs import HEADER, make_row
from optional import slow_except
from programs import run_command

from opgrip.display.figures import write_figure
from opgrip.errors import UserError
from opgrip.platform.peaks import Level, Peaks, to_json
from opgrip.replay.analyses.roofline import with_limits
from opgrip.replay.reports.outcome import Results
from opgrip.replay.reports.plots import PlotRequest, plots
from opgrip.replay.results.results import Result
from opgrip.tools.opgrip import main
from opgrip.traces import Trace, load

SVG = "{http://www.w3.org/2000/svg}"
EVIL = r"aten.<b>&$\frac{1}{0}$_x^2$.default"
CEILINGS = Peaks(
    machine=("a $x$ & <processor>",),
    device="cpu",
    threads=2,
    levels=(Level("L1", 32 << 10, 1, {1: 100.0, 2: 200.0}), Level("memory", None, 4, {1: 10.0, 2: 20.0})),
    rates={"float32": {1: 100.0, 2: 200.0}},
    launch_us=1.0,
    dispatch_us=0.5,
    torch="2.0",
    time="2026-01-01T00:00:00+00:00",
)


def row(number: int, us: float, **cells: Any) -> Result:
    usual = {"op": EVIL if number == 0 else f"aten.op{number % 3}.default", "p10_us": us * 0.9, "p90_us": us * 1.2}
    work = {"flops": 1000 * 4**number, "bytes_moved": 100 * 3**number, "math_dtype": "float32"}
    made = make_row(number, [us], **{key: value for key, value in cells.items() if key in ("mode", "op", "status")})
    return replace(made, **{**usual, **work, **cells})


def results(**header: Any) -> Results:
    rows = [
        row(number, 5.0 * 2**number * factor / threads**0.7, mode=mode, threads=threads)
        for number in range(8)
        for mode, factor in (("eager", 1.0), ("jit", 0.6))
        for threads in (1, 2)
    ]
    facts = {"trace": "a $y$ & <net>.jsonl", "ceilings": to_json(CEILINGS), "threads": 2}
    return Results(with_limits(rows, CEILINGS, lambda item: item.threads or 1), {**HEADER, **facts, **header})


def runs_for(kind: str) -> dict[str, Results]:
    if kind != "history":
        return {"one": results()}
    moments = ("2026-03-01T00:00:00+00:00", "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00")
    return {f"run{place}": results(time=time) for place, time in enumerate(moments)}


def picture(kind: str, form: str = "svg", **request: Any) -> bytes:
    plot = plots.get(kind)
    assert plot is not None
    file = io.BytesIO()
    write_figure(lambda: plot.draw(PlotRequest(runs_for(kind), **{"title": "a $t$ & <b>", **request})), form, file)
    return file.getvalue()


def texts(svg: bytes) -> list[str]:
    return ["".join(item.itertext()) for item in ElementTree.fromstring(svg).iter(f"{SVG}text")]


KINDS = {
    "modes": ("family (cases)", "jit (16 of 16 cases)"),
    "scaling": ("threads", "eager (8 of 8 cases)", "in proportion"),
    "shapes": ("bytes moved", "time", "eager", "jit", f"{EVIL[:33]}…"),
    "roofline": ("flop/byte", "0.1", "operations a second", "10 Gflop/s", "memory 20 GB/s", "200 Gflop/s"),
    "operators": ("time of all calls", "captured, 80.0 µs", "eager, 12.7 ms", "aten.op1.default"),
    "history": ("time of the run (UTC)", "time of all calls, by medians", "jit (16 cases)"),
}


def test_every_plot_kind_has_a_test() -> None:
    assert set(plots.names()) == set(KINDS)


@pytest.mark.parametrize("kind", slow_except([*KINDS][:1], KINDS))
def test_each_plot_kind_shows_its_data_and_is_reproducible(kind: str) -> None:
    svg = picture(kind)
    assert set(KINDS[kind]) <= set(texts(svg))
    assert any("a $t$ & <b>" in text for text in texts(svg))
    assert len(list(ElementTree.fromstring(svg).iter(f"{SVG}path"))) > 10
    assert svg == picture(kind)


def test_operators_plot_adds_up_calls_of_the_first_variant() -> None:
    rows = [
        row(number, 10.0 / threads, op=f"aten.{name}", count=3, threads=threads, captured_us=7.0)
        for number, name in enumerate(("b", "a", "a"))
        for threads in (1, 2)
    ]
    figure = Results(rows, {}).plot("operators", title="t")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["aten.a", "aten.b"]
    assert [bar.get_width() for bar in figure.axes[0].patches] == [42.0, 21.0, 60.0, 30.0]


def test_samples_are_plotted_over_the_size_of_their_arguments() -> None:
    sample = Results([row(0, 10.0, bytes_moved=None, flops=None, bytes_in=400)], {})
    with pytest.raises(UserError, match="bytes_in"):
        sample.plot("shapes")
    assert sample.plot("shapes", over="bytes_in").axes[0].get_xlabel() == "size of the arguments"


def test_scaling_plot_joins_rows_whose_shapes_differ_by_the_batch() -> None:
    rows = [row(0, 10.0 * batch, key=f"k{batch}", batch_scale=batch) for batch in (1, 4)]
    axes = Results(rows, {}).plot("scaling").axes[0]
    assert axes.get_legend_handles_labels()[1] == ["eager (1 of 1 cases)", "in proportion"]


def test_default_plot_shows_what_the_results_differ_in() -> None:
    whole = results()
    one_mode = replace(whole, rows=[row for row in whole if row.mode == "eager"])
    one_way = replace(whole, rows=[row for row in one_mode if row.threads == 1])
    labels = {
        name: run.plot().axes[0].get_xlabel().partition(" over")[0]
        for name, run in {"modes": whole, "threads": one_mode, "plain": one_way}.items()
    }
    assert labels == {"modes": "speed-up", "threads": "threads", "plain": "time of all calls"}
    assert one_way.plot("modes", beside={"before": whole}).axes[0].get_legend_handles_labels()[1] == [
        "before: jit (16 of 16 cases)"
    ]


def test_figure_keeps_its_style_with_other_matplotlib_settings(tmp_path: Path) -> None:
    import matplotlib

    figure = results().plot("modes")
    figure.savefig(tmp_path / "a.svg", metadata={"Date": None})
    with matplotlib.rc_context({"svg.fonttype": "path", "font.size": 20, "text.parse_math": True}):
        results().plot("modes").savefig(tmp_path / "b.svg", metadata={"Date": None})
    axis = "speed-up over eager (geometric mean of cases); bar: middle 80 % of cases"
    assert axis in texts((tmp_path / "b.svg").read_bytes())
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    images, widths = figure._repr_mimebundle_(include=None, exclude=None)
    assert images["image/png"].startswith("iVBORw0KGgo")
    assert widths["image/png"]["width"] == 660


def test_names_in_untrusted_results_remain_text() -> None:
    assert f"{EVIL} (2)" in texts(picture("modes", by="op"))
    shown = texts(picture("roofline"))
    assert any(EVIL in text for text in shown)
    assert any("a $x$ & <processor>" in text for text in shown)
    odd = "aten.\x1b[31m\ud800漢\n$"
    rows = [row(number, 5.0 + number, op=odd, mode=mode) for number in range(2) for mode in ("eager", "$jit_")]
    plot = plots.get("modes")
    assert plot is not None
    file = io.BytesIO()
    write_figure(lambda: plot.draw(PlotRequest({"$a": Results(rows, {})}, by="op")), "svg", file)
    assert "aten.\\x1b[31m\\ud800漢\\n$ (2)" in texts(file.getvalue())
    assert "$jit_ (2 of 2 cases)" in texts(file.getvalue())


HOSTILE = "</td></table><script>alert(1)</script><img src=x onerror=alert(2)>$x^2$\ud800\x1b[31m"


class Elements(HTMLParser):
    """Parser that collects the elements of a page with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def test_notebook_shows_a_table_and_an_image_without_untrusted_markup() -> None:
    rows = [replace(item, op=HOSTILE, shapes=HOSTILE, error=HOSTILE) for item in results()]
    page = Results(rows, {**HEADER, "trace": HOSTILE})._repr_html_()
    page.encode()
    elements = Elements(page).elements
    assert {tag for tag, _ in elements} == {"div", "p", "img", "table", "thead", "tbody", "tr", "th", "td"}
    (image,) = (attributes for tag, attributes in elements if tag == "img")
    assert str(image["src"]).startswith("data:image/png;base64,iVBORw0KGgo")
    assert image.keys() == {"width", "alt", "src"}
    # notebooks must not interpret its text as mathematics
    assert elements[0] == ("div", {"class": "tex2jax_ignore mathjax_ignore"})
    assert "threads" in [tag for tag in page.replace("</th>", "<th>").split("<th>") if "<" not in tag]


@pytest.mark.parametrize(
    "run", [results(), Results([row(0, 5.0, status="failed", median_us=None)], {}), Results([], {})]
)
def test_notebook_shows_only_the_table_without_matplotlib_or_times(
    run: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(run) > 1:
        assert "<img" in run._repr_html_()
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = run._repr_html_()
    assert "<img" not in page
    assert page.count("<tr") == len(run) + 1


def test_history_plot_sorts_runs_by_time() -> None:
    figures = []
    plot = plots.get("history")
    assert plot is not None
    write_figure(lambda: figures.append(plot.draw(PlotRequest(runs_for("history")))) or figures[0], "svg", io.BytesIO())
    moments = list(figures[0].axes[0].get_lines()[0].get_xdata())
    assert moments == sorted(moments)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    results().save(tmp_path / "one.json")
    replace(results(), rows=[row(0, 5.0)], header={"trace": "x"}).save(tmp_path / "plain.json")
    return tmp_path


@pytest.mark.slow
def test_plot_command_writes_images(saved: Path) -> None:
    for suffix in ("png", "svg"):
        done = run_command("opgrip", "plot", "one.json", "--kind", "modes", "-o", f"m.{suffix}", cwd=saved)
        assert (done.returncode, done.stderr) == (0, f"opgrip plot: wrote modes of 1 run to m.{suffix}\n")
        assert (saved / f"m.{suffix}").stat().st_size > 1000
    assert "a $y$ & <net>.jsonl; a processor; torch 2.13.0" in texts((saved / "m.svg").read_bytes())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            "one.json --kind modes -o x.gif",
            "x.gif does not end in the suffix of an image format: choose a name that ends in one of .svg, .pdf, .png",
        ),
        ("one.json --kind history -o x.svg", "--kind history needs several runs: name 2 or more"),
        ("one.json plain.json --kind roofline -o x.svg", "--kind roofline draws 1 run, not 2: draw one at a time"),
        ("one.json --kind modes --over bytes -o x.svg", "--kind modes does not take --over bytes: leave it out"),
        ("one.json --kind shapes --op nosuch -o x.svg", "no row is selected: choose another --op or --case"),
        (
            "plain.json --kind modes -o x.svg",
            "no case of the results was timed in two modes: replay with --mode, such as --mode jit",
        ),
        (
            "one.json plain.json --kind history -o x.svg",
            "plain does not contain the date of its run: use results that opreplay wrote",
        ),
    ],
)
def test_plot_that_cannot_be_drawn_is_reported_in_one_line(
    saved: Path, words: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(saved)
    assert main(["plot", *words.split()]) == 2
    assert capsys.readouterr().err == f"opgrip plot: error: {reason}\n"
    assert not (saved / "x.svg").exists()


EVIL_MARKUP = r"</text><script>x</script>$\frac{1}{0}$&\ud800"


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


@pytest.mark.slow
def test_names_of_an_untrusted_trace_remain_text(tiny_trace: Path, tmp_path: Path) -> None:
    text = tiny_trace.read_text()
    for name in ("aten.convolution.default", "forward"):
        text = text.replace(f'"{name}"', json.dumps(f"{EVIL_MARKUP}{name}"))
    (tmp_path / "t.jsonl").write_text(text)
    evil = load(tmp_path / "t.jsonl")
    evil.header["model"] = {"name": EVIL_MARKUP}
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
