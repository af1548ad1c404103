"""Comparisons of cases that changed and of cases that did not."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import HEADER, make_row, make_run
from programs import run_command, succeed

from opgrip.display.tables import literal
from opgrip.errors import UserError
from opgrip.replay.reports.comparison.comparison import compare, exit_status, hold, parse_gate, rows_of, summary
from opgrip.replay.reports.comparison.comparison_report import as_junit, print_comparison, write_comparisons
from opgrip.replay.reports.comparison.results_store import join_repeats
from opgrip.replay.reports.comparison.unpaired_ratio import USUAL, Difference, Prior, Verdict, judge, learn
from opgrip.replay.reports.outcome import Results, write_results
from opgrip.replay.results.results import Result

SLOWER_BY_5 = parse_gate("slower<=5%")


def with_rows(run: Results, change: Any) -> Results:
    return Results([change(row) for row in run], run.header)


def test_verdicts_match_known_differences() -> None:
    comparison = compare(make_run(1), make_run(2, slower=1.2))
    verdicts = {pair.base.case: pair.verdict for pair in comparison.pairs}
    long_cases = [verdicts[number] for number in range(60) if 10 ** (3 * number / 60) > 50]
    short_cases = [verdicts[number] for number in range(60) if 10 ** (3 * number / 60) <= 50]
    assert set(long_cases) == {Verdict.SLOWER}
    assert set(short_cases) <= {Verdict.SAME, Verdict.UNSURE}
    back = compare(make_run(2, slower=1.2), make_run(1))
    assert {pair.verdict for pair in back.pairs} == {Verdict.FASTER, *short_cases}
    assert all(pair.more_runs is None for pair in comparison.pairs if pair.verdict is not Verdict.UNSURE)


def test_one_repeat_cannot_decide_a_small_difference() -> None:
    comparison = compare(make_run(1, repeats=1), make_run(2, repeats=1, slower=1.05))
    assert comparison.counts[Verdict.SLOWER] == 0
    assert any(pair.more_runs for pair in comparison.pairs)


def test_cases_without_repeats_are_the_same_if_most_differ_little() -> None:
    quiet, noisy = ([make_run(seed, repeats=1, between=0.01, runs=runs) for seed in (1, 2)] for runs in (500, 20))
    assert compare(*quiet).counts[Verdict.SAME] > 30
    assert compare(*noisy).counts[Verdict.UNSURE] > 50


def test_cases_are_joined_if_their_numbers_differ() -> None:
    base, new = make_run(1), make_run(2)
    renumbered = Results([replace(row, case=100 - row.case) for row in reversed(new.rows)], new.header)
    comparison = compare(base, renumbered)
    assert len(comparison.pairs) == len(base)
    assert all(pair.base.key == pair.new.key for pair in comparison.pairs)
    assert (comparison.missing, comparison.added) == ([], [])


def test_broken_changed_missing_and_new_cases_are_reported() -> None:
    base, new = make_run(1, cases=6), make_run(2, cases=6)
    rows: list[Result] = list(new)
    rows[0] = replace(rows[0], status="failed", error="out of memory", median_us=None, times_us=None)
    rows[1] = replace(rows[1], status="wrong")
    rows[2] = replace(rows[2], faithful=False)
    changed = Results([*rows[:5], make_row(99, [1.0, 2.0])], new.header)
    comparison = compare(base, changed)
    assert [pair.new.case for pair in comparison.broken] == [0]
    assert sorted(pair.new.case for pair in comparison.changed) == [1, 2]
    assert [row.case for row in comparison.missing] == [5]
    assert [row.case for row in comparison.added] == [99]
    assert [pair.new.case for pair in compare(changed, base).fixed] == [0, 1]


def test_differing_run_facts_are_listed_first() -> None:
    other = {**HEADER, "device": "NVIDIA L4", "trace_hash": "11"}
    other["environment"] = {**HEADER["environment"], "versions": {"torch": "2.14.0", "numpy": "2.4"}}
    comparison = compare(make_run(1), Results(make_run(2).rows, other))
    assert comparison.differs == [
        ("device", "cpu", "NVIDIA L4"),
        ("trace hash", "00", "11"),
        ("torch", "2.13.0", "2.14.0"),
    ]


def test_gate_on_runs_without_common_cases_is_not_decided(runs: Path, tmp_path: Path) -> None:
    other = make_run(2, cases=3, mode="jit")
    write_results(other.rows, other.header, tmp_path / "other.json", force=False)
    words = ("base.json", tmp_path / "other.json", "--gate", "slower<=5%", "-o", tmp_path / "c.xml")
    done = run_command("opgrip", "compare", *words, cwd=runs)
    assert done.returncode == 3
    assert "gate slower<=5%: not decided: no case was timed in both runs" in done.stdout
    assert ElementTree.parse(tmp_path / "c.xml").getroot()[0].get("errors") == "1"


def test_wrong_case_that_now_fails_is_broken() -> None:
    base, new = make_run(1, cases=4), make_run(2, cases=4)
    was = ["wrong", "unsupported", "failed", "ok"]
    base = Results([replace(row, status=status) for row, status in zip(base, was, strict=True)], HEADER)
    new = with_rows(new, lambda row: replace(row, status="failed", error="it crashed") if row.case < 3 else row)
    comparison = compare(base, new)
    assert [pair.new.case for pair in comparison.broken] == [0]
    # cases that are untimed in both runs are reported too
    assert [pair.new.case for pair in comparison.untimed] == [1, 2]
    assert "1 no longer ok, 2 not timed" in summary(comparison)
    assert len(hold(parse_gate("failed<=0"), comparison).rows) == 1
    (added,) = [
        row for row in rows_of(compare(make_run(1, cases=2), Results(new.rows[2:], HEADER))) if row.verdict == "ADDED"
    ][:1]
    assert (added.verdict, added.reason) == ("ADDED", "failed: it crashed")


def test_variants_of_a_case_are_compared_separately(tmp_path: Path) -> None:
    def sweep(seed: int, slower: float) -> Results:
        rows = make_run(seed, cases=20).rows
        many = make_run(seed, cases=20, slower=slower, longer_than_us=0.0).rows
        return Results([*(replace(row, threads=1) for row in rows), *(replace(row, threads=2) for row in many)], HEADER)

    comparison = compare(sweep(1, 1.0), sweep(2, 2.0))
    slower = [row for row in rows_of(comparison) if row.verdict == "SLOWER"]
    assert {row.variant for row in slower} == {"2 threads"}
    assert "2 threads" in hold(SLOWER_BY_5, comparison).line
    # of several comparisons in one document, only rows that violate the gate fail
    suites = ElementTree.fromstring(as_junit([comparison, comparison], [SLOWER_BY_5]))
    # each slower row, and the gate
    assert [suite.get("failures") for suite in suites] == [str(len(slower) + 1)] * 2
    failed = [test.get("name") or "" for test in suites.iter("testcase") if test.find("failure") is not None]
    assert all("(2 threads)" in name for name in failed if name != "slower<=5%")
    write_comparisons([comparison], [SLOWER_BY_5], tmp_path / "c.md", force=False)
    assert "| variant |" in (tmp_path / "c.md").read_text()


def test_steps_of_a_coarse_clock_are_not_significant() -> None:
    """Each repeat has exactly equal times, and the next repeat differs by one step of the clock."""

    def run(time: float) -> Results:
        rows = [join_repeats([make_row(number, [time] * 20) for _ in range(5)]) for number in range(30)]
        return Results(rows, HEADER)

    assert compare(run(100.0), run(100.0)).counts == {Verdict.SAME: 30}
    assert compare(run(100.0), run(101.0)).counts[Verdict.SLOWER] == 0


def test_groups_combine_their_cases() -> None:
    comparison = compare(make_run(1, module="neck"), make_run(2, slower=1.3, module="neck"))
    (total,) = comparison.totals()
    (module,) = comparison.totals("module")
    assert (total.cases, module.name, module.judgement.verdict) == (60, "neck", Verdict.SLOWER)
    assert total.judgement.ratio == pytest.approx(total.new_us / total.base_us)
    assert 1.2 < total.judgement.low < total.judgement.ratio < total.judgement.high


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(1e-6, 0.1)), min_size=1, max_size=30))
def test_swapping_base_and_new_mirrors_the_verdict(pairs: list[tuple[float, float]]) -> None:
    there = [Difference(ratio, variance, 8.0, 5, 5) for ratio, variance in pairs]
    back = [replace(item, log_ratio=-item.log_ratio) for item in there]
    opposite = {Verdict.SLOWER: Verdict.FASTER, Verdict.FASTER: Verdict.SLOWER}
    for one, other in zip(judge(there, 0.05), judge(back, 0.05), strict=True):
        assert opposite.get(one.verdict, one.verdict) is other.verdict
        assert one.ratio == pytest.approx(1 / other.ratio)
        assert (one.low, one.high) == (pytest.approx(1 / other.high), pytest.approx(1 / other.low))
        assert one.low <= one.ratio <= one.high


def test_variance_of_a_case_is_estimated_from_all_cases() -> None:
    # sums of squares of four degrees of freedom around a variance of 0.04, distributed like chi-squared
    squares = [0.04 * value for value in (0.7, 1.3, 1.9, 2.4, 2.9, 3.4, 3.9, 4.6, 5.4, 6.6, 8.5, 11.0)]
    prior = learn([(value, 4) for value in squares], USUAL[False])
    assert prior.variance == pytest.approx(0.04, rel=0.2)
    assert prior.freedom > 20
    # cases with different variances keep their own estimate
    scattered = learn([(value * 100.0 ** (place % 3), 4) for place, value in enumerate(squares)], USUAL[False])
    assert scattered.freedom < 2
    assert learn([(0.1, 4)] * 3, USUAL[True]) == USUAL[True]
    assert Prior(0.01, 4.0).posterior(0.04, 4) == (pytest.approx(0.01), 8.0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    doubtful = make_run(4, between=0.3)
    made = {"base": make_run(1), "same": make_run(2), "slow": make_run(3, slower=1.3), "doubtful": doubtful}
    for name, run in made.items():
        write_results(run.rows, run.header, folder / f"{name}.json", force=False)
    return folder


def test_gate_outcomes_are_printed_and_set_the_exit_status(runs: Path) -> None:
    def compared(new: str, *gates: str) -> tuple[int, list[str]]:
        words = [word for gate in gates for word in ("--gate", gate)]
        done = run_command("opgrip", "compare", "base.json", new, *words, cwd=runs)
        return done.returncode, [line for line in done.stdout.splitlines() if line.startswith("gate ")]

    status, lines = compared("slow.json", "slower<=5%", "total<=60%")
    assert (status, lines[1]) == (1, "gate total<=60%: passed")
    assert lines[0].startswith("gate slower<=5%: failed: 26 of 60 rows, worst aten.op")
    status, lines = compared("same.json", "slower<=5%", "total<=5%", "op<=5%")
    passed = ["gate slower<=5%: passed", "gate total<=5%: passed", "gate op<=5%: passed"]
    assert (status, [line.partition(": but ")[0] for line in lines]) == (0, passed)
    # the worst value counts
    status, lines = compared("doubtful.json", "slower<=5%", "failed<=0")
    assert status == 3
    assert lines[0].startswith("gate slower<=5%: not decided: ")
    assert lines[0].endswith(": replay both with --repeats 10")


@pytest.mark.parametrize("text", ["slower", "slower<=5", "failed<=5%", "faster<=1%", "slower<=-1%"])
def test_invalid_gate_is_refused(text: str, runs: Path) -> None:
    with pytest.raises(UserError, match="is not a gate"):
        parse_gate(text)
    done = run_command("opgrip", "compare", "base.json", "same.json", "--gate", text, cwd=runs)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(("new", "status", "element"), [("slow", 1, "failure"), ("doubtful", 3, "error")])
def test_files_contain_the_gate_line_of_the_terminal(
    new: str, status: int, element: str, runs: Path, tmp_path: Path
) -> None:
    base, head = (Results.load(runs / f"{name}.json") for name in ("base", new))
    comparison, gate = compare(base, head), parse_gate("slower<=5%")
    (held,) = comparison.gate("slower<=5%")
    printed = io.StringIO()
    print_comparison(comparison, printed, held=[held])
    assert printed.getvalue().splitlines()[-1] == held.line
    for suffix in (".json", ".csv", ".md", ".xml"):
        write_comparisons([comparison], [gate], tmp_path / f"c{suffix}", force=False)
    (stored,) = json.loads((tmp_path / "c.json").read_text())
    assert stored["gates"][0]["line"] == held.line
    assert stored["gates"][0]["outcome"] == held.outcome.value
    markdown = (tmp_path / "c.md").read_text()
    assert markdown.startswith(f"### opgrip compare: {held.outcome.value}\n")
    assert f"- `gate slower<=5%: {held.outcome.value}`: {literal(held.reason)}\n" in markdown
    suite = ElementTree.parse(tmp_path / "c.xml").getroot()[0]
    assert [item.get("value") for item in suite.iter("property")][-1] == held.line
    bad = {test.get("name"): test for test in suite.iter("testcase") if test.find(element) is not None}
    message = bad["slower<=5%"].find(element)
    assert message is not None
    assert message.get("message") == held.line
    assert len(bad) == len(held.rows) + 1
    assert exit_status([held]) == status


def test_names_in_untrusted_results_remain_text(tmp_path: Path) -> None:
    evil = "aten.<script>|`]](x)\x1b[2J\x00"
    for name, seed in (("a", 1), ("b", 2)):
        run = make_run(seed, op=evil, slower=1.0 + seed)
        write_results(run.rows, run.header, tmp_path / f"{name}.json", force=False)
    for suffix in (".md", ".xml", ".csv"):
        done = succeed("opgrip", "compare", "a.json", "b.json", "-o", f"c{suffix}", cwd=tmp_path)
        text = (tmp_path / f"c{suffix}").read_text()
        assert "\x1b" not in text + done.stdout
        assert "\x00" not in text
    assert "<script>" not in (tmp_path / "c.md").read_text().replace("\\<", "")
    ElementTree.parse(tmp_path / "c.xml")


def test_notebook_shows_differences_and_the_worst_rows_first() -> None:
    evil = "<script>alert(1)</script>"
    new = Results(make_run(2, slower=1.3, module=evil).rows, {**HEADER, "trace": evil})
    comparison = compare(make_run(1, module=evil), new)
    assert repr(comparison).startswith("<Comparison: 60 cases timed in both: ")
    assert next(iter(comparison.frame["verdict"])) == "SLOWER"
    assert len(comparison.frame) == 60
    page = comparison._repr_html_()
    assert "<script" not in page
    assert f"new: {evil.replace('<', '&lt;').replace('>', '&gt;')}, here, cpu" in page
    assert page.index("SLOWER") < page.index("all calls of these cases") < page.index("<table")


def test_rows_of_equal_runs_are_printed_on_request() -> None:
    comparison = compare(make_run(1, cases=4), make_run(2, cases=4))
    for all_rows in (False, True):
        printed = io.StringIO()
        print_comparison(comparison, printed, all_rows=all_rows)
        assert "4 cases timed in both" in printed.getvalue()
        assert ("aten.op0" in printed.getvalue()) == all_rows
