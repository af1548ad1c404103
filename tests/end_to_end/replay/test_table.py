"""Tables and progress on terminals of any width, and the meaning of their shares."""

import fcntl
import io
import json
import os
import pty
import re
import struct
import termios
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyte
import pytest
import torch
from busy import compared_times
from example_trace import write
from forks import run_forked
from hypothesis import given
from hypothesis import strategies as st
from programs import program_path, refusal, run_command, succeed
from rich.console import Console

from opgrip.capture import Capture
from opgrip.cli.command import counted
from opgrip.cli.progress import QuietReporter, Reporter
from opgrip.cli.terminal import fold
from opgrip.display.tables import TableColumn, markdown_table, print_table
from opgrip.replay import Results
from opgrip.replay.analyses.speed_ups import print_points
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.cases.selection import Selection
from opgrip.replay.results.results import Result
from opgrip.traces import load
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import OPERATOR, Calls, Record, Scope, Signature, Thread

LINES = 2000  # lines of the terminal, enough that no output scrolls off


@dataclass(frozen=True)
class Shown:
    lines: list[str]
    sent: bytes

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def show(width: int, name: str, *args: object, **variables: str) -> Shown:
    """Run a command on a terminal with `width` columns and with additional variables of its environment."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, width, 0, 0))
    chunks: list[bytes] = []
    reader = threading.Thread(target=_read_all, args=(ours, chunks))
    reader.start()
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    try:
        done = run_forked(
            [program_path(name), *map(str, args)], env={**env, "TERM": "xterm-256color", **variables}, terminal=theirs
        )
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    assert done.returncode == 0, done.stderr
    screen = pyte.Screen(width, LINES)
    sent = b"".join(chunks)
    pyte.ByteStream(screen).feed(sent)
    return Shown([line.rstrip() for line in screen.display], sent)


def _read_all(terminal: int, chunks: list[bytes]) -> None:
    while True:
        try:
            chunk = os.read(terminal, 1 << 16)
        except OSError:
            # Linux reports in this way that the other end was closed
            return
        if not chunk:
            return
        chunks.append(chunk)


FAST = ("--iterations", "2", "--warmup", "0")
WIDTHS = (60, 80, 120, 200)
SPEC = TensorSpec((3,), (1,), torch.float32, "cpu")
ROW = Result(
    *(3, "aten.mm.default", "float32[2,2]", 2, 1.0, "eager", "cpu", "ok", 1.0, 2.0),
    median_us=1.5,
    p10_us=1.2,
    p90_us=2.5,
    flops=16,
)


def numbers_in(text: str) -> set[str]:
    """Return all numbers in a table's cells except times, which differ from run to run."""
    return set(re.findall(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?%?(?![\w.])", text))


def trace_of(path: Path, durations: dict[str, list[int]]) -> Path:
    records: list[Record] = [Scope(0, "m", "M", "forward"), Thread(0, "MainThread")]
    start = 0
    for number, (op, times) in enumerate(durations.items()):
        records.append(Signature(number, OPERATOR, op, (SPEC,), {}, SPEC))
        count = len(times)
        starts = [start + place * 10**9 for place in range(count)]
        start += count * 10**9
        records.append(Calls(0, [number] * count, [0] * count, starts, times, [2] * count, [0, 1] * count))
    return write(path, records)


@pytest.mark.parametrize(
    "width", [pytest.param(width, marks=pytest.mark.slow) if place else width for place, width in enumerate(WIDTHS)]
)
def test_table_shows_every_number_in_full_at_any_width(width: int, detector_trace: Path) -> None:
    shown = show(width, "opreplay", detector_trace, *FAST, "--top", "4", "--cache", "warm", "--mode", "eager,jit")
    assert max(map(len, shown.lines)) <= width
    # a note below the table about calls with two timing clusters begins with a shortened name
    assert "…" not in shown.text.replace("…:", ":")
    cases = make_cases(load(detector_trace), Selection(top=4))
    for case in cases:
        # every table shows at least the sizes of the arguments
        sizes = {str(size) for spec in case.signature.args if isinstance(spec, TensorSpec) for size in spec.shape}
        assert sizes <= set(re.findall(r"\d+", shown.text))
        if width >= 80:
            captured = f"{case.captured_us:,.0f}" if case.captured_us >= 100 else f"{case.captured_us:.1f}"
            assert {f"{case.share:.1%}", captured} <= numbers_in(shown.text)
    assert shown.text.count(" ok") + shown.text.count(" contended") >= 8
    assert "speed-up" in shown.text
    assert "compared with eager" in shown.text


def test_terminal_output_is_styled_unless_no_color_is_set(tiny_trace: Path) -> None:
    command = ("opgrip", "trace", "info", tiny_trace)
    assert b"\x1b[" in show(100, *command).sent
    assert b"\x1b[" not in show(100, *command, NO_COLOR="1").sent


def test_single_outlier_does_not_lead_the_table(tmp_path: Path) -> None:
    times = {"aten.relu.default": [1000, 1000, 1000, 50_000], "aten.neg.default": [9000, 9000]}
    trace = load(trace_of(tmp_path / "t.jsonl", times))
    first, second = make_cases(trace)
    assert (first.op, first.share) == ("aten.neg.default", pytest.approx(18 / 22))
    # the real duration of the calls is available too
    assert (second.captured_us, second.captured_total_us) == (1.0, 53.0)
    assert make_cases(trace, Selection(top=1)) == [first] or make_cases(trace, Selection(top=1))[0].op == first.op
    summary = trace.summary()
    assert summary["op"].tolist() == ["aten.neg.default", "aten.relu.default"]
    assert summary["share"].tolist() == pytest.approx([18 / 22, 4 / 22])
    assert summary["total_us"].tolist() == pytest.approx([18.0, 53.0])


@pytest.fixture(scope="module")
def marked_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("marked") / "t.jsonl"
    with Capture(path) as watched:
        for _ in range(2):
            with torch.profiler.record_function("forward pass"), torch.profiler.record_function("inner"):
                y = torch.ones(3).sin()
            with torch.profiler.record_function("after"):
                y.cos()
            y.exp()
    # six labels are opened and closed
    assert (watched.calls, watched.signatures, watched.marks) == (8, 4, 12)
    assert watched.perturbed == load(path).own_calls["perturbed"].sum()
    return path


def test_record_function_marks_are_in_no_table_of_operators(marked_trace: Path, tmp_path: Path) -> None:
    graph = tmp_path / "graph.json"
    for command in (("opreplay", marked_trace, *FAST), ("opgrip", "trace", "graph", marked_trace, "-o", graph)):
        done = succeed(*command)
        assert "_record_function" not in done.stdout
    assert "_record_function" not in graph.read_text(encoding="utf-8")
    info = run_command("opgrip", "trace", "info", marked_trace).stdout
    assert "_record_function" not in info
    assert "forward pass (2), inner (2), after (2)" in info
    assert re.search(r"^calls +8$", info, re.MULTILINE)
    sequence = run_command("opreplay", marked_trace, "--sequence")
    assert "opreplay: replaying 8 calls in their order" in sequence.stderr
    assert re.search(r"^calls +8: ", sequence.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("labels", "operators"),
    [
        (["forward*"], {"aten.ones.default", "aten.sin.default"}),
        (["inner", "after"], {"aten.ones.default", "aten.sin.default", "aten.cos.default"}),
        (["*"], {"aten.ones.default", "aten.sin.default", "aten.cos.default"}),
    ],
)
def test_label_selects_the_calls_within_it(marked_trace: Path, labels: list[str], operators: set[str]) -> None:
    trace = load(marked_trace)
    cases = make_cases(trace, Selection(label=tuple(labels)))
    # without entries of zero calls for the other operators
    assert set(trace.filter(label=labels).calls["op"].value_counts().index) == operators
    assert {case.op for case in cases} == operators
    assert sum(case.share for case in cases) == pytest.approx(1)


def test_trace_info_and_trim_select_by_label(marked_trace: Path, tmp_path: Path) -> None:
    words = ("opgrip", "trace", "info", marked_trace, "--json", "--by", "label", "--by", "signature")
    tables = json.loads(succeed(*words).stdout)
    assert {row["label"]: row["calls"] for row in tables["label"]} == {"inner": 4, "after": 2, "": 2}
    rows = json.loads(succeed(*words, "--label", "forward*", "--phase", "forward").stdout)["signature"]
    assert {(row["op"], row["shapes"].split()[0]) for row in rows} == {
        ("aten.ones.default", "[3]"),
        ("aten.sin.default", "float32[3]"),
    }
    succeed("opgrip", "trace", "trim", marked_trace, "--label", "after", "-o", tmp_path / "part.jsonl")
    part = load(tmp_path / "part.jsonl")
    assert (part.labels.to_dict(), set(part.own_calls["op"])) == ({"after": 2}, {"aten.cos.default"})
    # each label is closed as well
    assert len(part.calls) - len(part.own_calls) == 4


def test_unknown_label_is_reported_with_the_existing_labels(marked_trace: Path) -> None:
    error = refusal("opreplay", marked_trace, "--label", "backward")
    message = "no label matches --label backward: the trace has 'forward pass', 'after', 'inner'"
    assert error == f"opreplay: error: {message}\n"


@pytest.mark.alone
def test_several_values_threads_and_caches_are_compared(tiny_trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    points = ("--values", "recorded,random", "--threads", "1,2", "--cache", "warm,cold,program")
    done = succeed("opreplay", tiny_trace, *FAST, "--top", "2", *points, "-o", output)
    lines = done.stdout.splitlines()
    rows = Results.load(output).frame
    assert len(rows) == 2 * 2 * 2 * 3
    first = (rows["values"] == "recorded") & (rows["threads"] == 1) & (rows["cache"] == "warm")
    assert rows[first]["ratio"].isna().all()
    expected = {"values recorded": ["random"], "threads 1": ["2"], "cache warm": ["cold", "program"]}
    with compared_times():
        assert rows[~first]["ratio"].notna().all()
        for title, names in expected.items():
            heading, _, *below = lines[lines.index(f"compared with {title}") + 1 :]
            assert heading.split() == [
                title.split()[0],
                *["cases", "speed-up", "p10", "p90", "by", "calls", "faster", "slower"],
            ]
            assert [row.split()[:2] for row in below[: len(names)]] == [[name, "2"] for name in names]


def test_comparison_shows_the_ratio_with_its_spread() -> None:
    ratios = [(0.5, 0.4, 0.6), (2.0, 1.5, 2.5), (1.0, 0.8, 1.2)]
    rows = [replace(ROW, case=case) for case in range(3)]
    rows += [
        replace(ROW, case=case, values="zeros", ratio=ratio, ratio_p10=low, ratio_p90=high)
        for case, (ratio, low, high) in enumerate(ratios)
    ]
    text = io.StringIO()
    print_points(rows, "eager", text)
    row = next(line for line in text.getvalue().splitlines() if line.startswith("zeros"))
    # percentiles of 2, 1 and 1/2 on a logarithmic scale, on which twice and half are equally far from 1
    assert row.split() == ["zeros", "3", "1.00", "0.57", "1.74", "1.00", "1", "1"]
    text = io.StringIO()
    print_points([rows[0], rows[3]], "eager", text)
    row = next(line for line in text.getvalue().splitlines() if line.startswith("zeros"))
    # for one case, the percentiles of its runs
    assert row.split()[2:5] == ["2.00", "1.67", "2.50"]


@pytest.mark.parametrize("suffix", [".json", ".csv"])
def test_single_times_are_stored_and_rates_use_the_median(tiny_trace: Path, tmp_path: Path, suffix: str) -> None:
    output = tmp_path / f"results{suffix}"
    command = ("opreplay", tiny_trace, "--op", "aten.addmm*", "--cache", "warm", "--iterations", "5", "--warmup", "0")
    assert run_command(*command, "-o", output).returncode == 0
    (_, row), *_ = Results.load(output).frame.iterrows()
    assert len(row["times_us"]) == row["samples"] == 5
    assert row["mean_us"] == pytest.approx(sum(row["times_us"]) / 5, rel=1e-4)
    assert row["median_us"] == pytest.approx(sorted(row["times_us"])[2], rel=1e-4)
    assert row["gflop_per_s"] == pytest.approx(row["flops"] / row["median_us"] / 1e3)
    assert row["gb_per_s"] == pytest.approx(row["bytes_moved"] / row["median_us"] / 1e3)


NUMBER = re.compile(r"\d[\d.,]*\d|\d")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(
    columns: Sequence[TableColumn], rows: Sequence[object], width: int, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    print_table(columns, rows, terminal)
    return terminal.getvalue().splitlines()


COLUMNS = (
    TableColumn("share", lambda row: 0.099 / (row + 1), ".1%", rank=1),
    TableColumn("operator", lambda row: "aten.native_batch_norm_backward.default", least=20),
    TableColumn("shapes", lambda row: "float32[2,64,64,64] " * 6, below=True),
    TableColumn("replayed us", lambda row: 1234567 + row, ",d"),
    TableColumn("p10", lambda row: 1034567 + row, ",d", rank=2),
    TableColumn("p90", lambda row: 1934567 + row, ",d", rank=3),
    TableColumn("mean", lambda row: 1334567 + row, ",d", rank=4),
    TableColumn("speed-up", lambda row: None, ".2f", when=lambda row: False),
)


@given(st.text(alphabet="a1.,_ []x-", max_size=80), st.integers(8, 40))
def test_folded_text_is_complete_and_numbers_are_not_split(text: str, width: int) -> None:
    lines = fold(text, width)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(len(line) <= width for line in lines) or not text.strip()
    digits = [match for match in re.findall(r"[\d.]*\d[\d.]*", text) if len(match) <= width]
    assert all(any(match in line for line in lines) for match in digits)


def test_text_of_megabytes_is_cut_early(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [TableColumn("name", str), TableColumn("n", len, "d")]
    rows = ["x" * 4_000_000, *["y"] * 1000]
    pipe = io.StringIO()
    print_table(columns, rows, pipe)
    assert max(map(len, pipe.getvalue().splitlines())) < 200
    assert all(len(line) <= 80 for line in printed(columns, rows, 80, monkeypatch))


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_table_fits_its_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(COLUMNS, range(3), width, monkeypatch)
    assert all(len(line) <= width for line in lines)
    assert "1,234,567" in NUMBER.findall("\n".join(lines))
    # columns that were requested stay, whatever else is removed
    assert any("replayed" in line for line in lines)


def test_table_in_a_pipe_has_no_colours_and_no_trailing_spaces() -> None:
    pipe = io.StringIO()
    columns = [TableColumn("op", "real"), TableColumn("us", "imag", ",.1f"), TableColumn("note", lambda row: None)]
    print_table(columns, [1 + 2000j, 10 + 3j], pipe, "times", style=lambda row: "red")
    assert (
        pipe.getvalue()
        == """\
times
op          us   note
─────────────────────
1.0    2,000.0   -
10.0       3.0   -

"""
    )


def test_markdown_table_escapes_text() -> None:
    columns = [TableColumn("op", str), TableColumn("us", len, "d")]
    rows = ["a|b*", "x_y"]
    assert markdown_table(columns, rows) == ["| op | us |", "| --- | --- |", r"| a\|b\* | 4 |", "| x_y | 3 |"]


def test_numbers_and_nouns_agree() -> None:
    assert [counted(0, "case"), counted(1, "case"), counted(1200, "case")] == ["0 cases", "1 case", "1,200 cases"]
    assert [counted(1, "pass", "passes"), counted(2, "pass", "passes")] == ["1 pass", "2 passes"]


def on_terminal(width: int = 80) -> tuple[Reporter, io.StringIO]:
    written = io.StringIO()
    reporter = Reporter("opcapture")
    reporter.console = Console(file=written, force_terminal=True, width=width)
    return reporter, written


def test_progress_uses_no_thread_while_something_is_measured() -> None:
    reporter, _ = on_terminal()
    # threads of other tests may end meanwhile
    before = set(threading.enumerate())
    with reporter.doing("timing", 3):
        assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("width", [20, 40, 60, 80, 160])
def test_narrow_terminal_shows_no_bar_and_whole_numbers(width: int) -> None:
    reporter, written = on_terminal(width)
    with reporter.doing("replaying 1234 cases on cuda:0", 1234) as advance:
        for _ in range(1234):
            advance()
    with reporter.following("replaying 5678 calls in their order") as on_progress:
        on_progress("timed runs", 123, 456)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= width
    assert any("1234/1234" in line for line in lines)
    assert any("123/456" in line and re.search(r"\d:\d\d:\d\d", line) for line in lines)
    assert not any("…" in line for line in lines)
    assert ("━" in written.getvalue()) == (width >= 80)
    assert any(line.startswith("replaying") for line in lines) == (width >= 40)


def test_jupyter_without_widgets_shows_nothing_and_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opgrip.cli.progress.has_widgets", lambda: False)
    reporter = QuietReporter("opgrip")
    written = io.StringIO()
    reporter.console = Console(file=written, force_jupyter=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with reporter.doing("replaying", 3) as advance:
            advance()
        with reporter.following("replaying") as on_progress:
            on_progress("timed runs", 1, 2)
    assert written.getvalue() == ""
