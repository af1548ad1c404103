"""Everything derived from declarations of options and columns, such as the identity of a row."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import HEADER, make_row
from programs import ROOT, run_python
from settings import settings_of

from opgrip.capture import Capture
from opgrip.cli.options import CASES, EFFORT, IDENTITY, OUTPUT, RUN, options_in
from opgrip.errors import UserError
from opgrip.replay.analyses.nsys import NsysColumns
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.command.job import job_from_arguments, make_parser, option_classes
from opgrip.replay.command.run_requests import request_with
from opgrip.replay.reports.cells import all_columns, read_frame
from opgrip.replay.reports.comparison.comparison import compare
from opgrip.replay.reports.comparison.results_store import merge_runs
from opgrip.replay.reports.outcome import Results
from opgrip.replay.reports.result_files import write_json
from opgrip.replay.results.results import VARIANT_COLUMNS, Result
from opgrip.replay.run.request import identity
from opgrip.replay.run.workload import expected_rows
from opgrip.traces import load

TIMES = [10.0, 10.1, 10.2]


def run_of(*rows: Result, **header: Any) -> Results:
    return Results(list(rows), {**HEADER, **header})


def rows_with(program: Path, **options: Any) -> dict[str, Result]:
    rows = expected_rows(make_cases(load(program)), settings_of(**options))
    return {f"{row.op} {row.mode}": row for row in rows}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("identity") / "program.jsonl"
    with Capture(path):
        torch.randn(4, 8).relu()
        torch.arange(8).cumsum(0)
    return path


def test_every_option_declares_its_role() -> None:
    options = {word: about for declared in option_classes() for _, word, _, about in options_in(declared)}
    unsaid = [word for word, about in options.items() if about.role not in (IDENTITY, RUN, CASES, EFFORT, OUTPUT)]
    assert not unsaid, f"declare a role of {unsaid}"
    columns = {about.column or word for word, about in options.items() if about.role == IDENTITY}
    assert columns == {*VARIANT_COLUMNS}


@pytest.mark.parametrize("column", VARIANT_COLUMNS)
def test_rows_that_differ_in_a_variant_column_have_another_identity(column: str) -> None:
    row = make_row(1, TIMES)
    other = replace(row, **{column: "cuda" if column == "device" else "other"})
    assert row.identity_without() != other.identity_without()


def test_options_without_a_column_are_in_the_header() -> None:
    words = [
        "trace.jsonl",
        "--reference",
        "jit",
        "--pin",
        "0,1",
        "--rtol",
        "0.5",
        "--split",
        "--exec-mode",
        "continuous",
    ]
    settings = job_from_arguments(make_parser().parse_args(words)).settings
    assert settings == {"split": "yes", "pin": "0,1", "reference": "jit", "rtol": "0.5", "exec_mode": "continuous"}
    assert not job_from_arguments(make_parser().parse_args(["trace.jsonl", "--dtype", "float64"])).settings


def test_row_has_the_dtype_in_which_it_ran(program: Path) -> None:
    recorded, cast = rows_with(program), rows_with(program, dtype="float64")
    relu, cast_relu = recorded["aten.relu.default eager"], cast["aten.relu.default eager"]
    assert (relu.shapes, relu.dtype, relu.bytes_in) == ("float32[4,8]", "", 128)
    assert (cast_relu.shapes, cast_relu.dtype, cast_relu.bytes_in) == ("float64[4,8]", "float64", 256)
    assert relu.key == cast_relu.key
    assert relu.identity_without() != cast_relu.identity_without()
    assert cast_relu.variant == "float64"
    # cases that cannot be cast, or have that dtype already, keep their identity
    name = "aten.cumsum.default eager"
    assert recorded[name] == cast[name]
    assert rows_with(program, dtype="float32") == recorded


@pytest.mark.parametrize(
    ("column", "old", "new", "difference"),
    [
        ("dtype", "", "float64", ("dtype", "as recorded", "float64")),
        ("tune", "", "64", ("tune", "none", "64")),
        ("threads", None, 4, ("threads", "as recorded", "4")),
        ("method", "discrete", "continuous", ("method", "discrete", "continuous")),
        ("values", "recorded", "zeros", ("values", "recorded", "zeros")),
    ],
)
def test_runs_with_one_differing_setting_are_compared_and_it_is_reported(
    column: str, old: object, new: object, difference: tuple[str, ...]
) -> None:
    base, other = ([make_row(number, TIMES, **{column: value}) for number in (1, 2)] for value in (old, new))
    comparison = compare(run_of(*base), run_of(*other))
    assert len(comparison.pairs) == 2
    assert list(comparison.differs) == [difference]


def test_rows_of_two_dtypes_in_one_run_are_joined_by_dtype() -> None:
    both = [make_row(1, TIMES, dtype=dtype) for dtype in ("", "float64")]
    comparison = compare(run_of(both[1]), run_of(*both))
    assert [pair.new.dtype for pair in comparison.pairs] == ["float64"]
    assert [row.dtype for row in comparison.added] == [""]


@pytest.mark.parametrize("column", ["dtype", "tune", "method"])
def test_rows_of_different_variants_are_not_pooled(column: str) -> None:
    base, other = make_row(1, TIMES), make_row(1, TIMES[::-1], **{column: "other"})
    merged = merge_runs([run_of(base), run_of(other)])
    assert [row.repeats for row in merged.rows] == [None, None]


@pytest.mark.parametrize("settings", [{"seed": 1}, {"settings": {"reference": "jit"}}, {"settings": {"pin": "0"}}])
def test_runs_with_different_options_are_not_merged(settings: dict[str, Any]) -> None:
    runs = [run_of(make_row(1, TIMES), seed=0), run_of(make_row(1, TIMES[::-1]), **{"seed": 0, **settings})]
    with pytest.raises(UserError, match="differ in options"):
        merge_runs(runs)


def test_results_of_earlier_versions_are_read_and_compared(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with path.open("w", encoding="utf-8") as file:
        write_json([make_row(1, TIMES)], HEADER, file)
    text = path.read_text(encoding="utf-8")
    lines: Sequence[str] = [line for line in text.splitlines() if '"dtype"' not in line and '"tune"' not in line]
    path.write_text("\n".join(lines), encoding="utf-8")
    comparison = compare(Results.load(path), run_of(make_row(1, TIMES)))
    assert len(comparison.pairs) == 1
    assert not comparison.differs


def test_failed_row_is_joined_with_one_that_ran(program: Path) -> None:
    rows = list(rows_with(program).values())
    ran = [replace(row, median_us=1.0, times_us=[1.0]) for row in rows]
    failed = [replace(row, status="failed", error="it broke") for row in rows]
    assert len(compare(run_of(*ran), run_of(*failed)).broken) == len(rows)


ROW = Result(3, "aten.mm.default", "float32[2,2]", 2, 1.0, "eager", "cpu", "ok", 1.0, 2.0, median_us=1.5, flops=16)


@pytest.mark.parametrize("suffix", [".json", ".csv"])
def test_files_and_frames_have_all_columns_in_order_and_round_trip(tmp_path: Path, suffix: str) -> None:
    rows = [ROW.adding(NsysColumns(nsys_us=2.0, nsys_runs=4)), ROW]
    results = Results(rows, {"trace": "t.jsonl"})
    results.save(tmp_path / f"out{suffix}")
    names = [about.name for about in all_columns()]
    assert names[:3] == ["case", "op", "shapes"]
    assert list(read_frame(tmp_path / f"out{suffix}").columns) == list(results.frame.columns) == names
    first, second = Results.load(tmp_path / f"out{suffix}")
    assert (NsysColumns.of(first), NsysColumns.of(second)) == (NsysColumns(nsys_us=2.0, nsys_runs=4), NsysColumns())
    assert type(NsysColumns.of(first).nsys_runs) is int
    assert (first.case, first.flops, second.threads) == (3, 16, None)


def test_roofline_drawing_requires_limits(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="replay with roofline="):
        Results([ROW], {"trace": "t.jsonl"}).save(tmp_path / "out.svg")
    assert not list(tmp_path.iterdir())


def test_explicit_default_options_do_not_change_the_identity(tiny_trace: Path) -> None:
    plain = identity(request_with(tiny_trace))
    assert identity(request_with(tiny_trace, cache="program", mode="eager", timeout=7, memory_limit="8GB")) == plain
    assert (
        identity(request_with(tiny_trace, mode="jit"))
        == identity(request_with(tiny_trace, mode=["eager", "jit"]))
        != plain
    )
    assert identity(request_with(tiny_trace, top=3)) != plain


def test_documented_options_and_columns_match_their_declarations() -> None:
    # in an interpreter without parts that other tests add
    run_python(ROOT / "docs" / "tables.py", "--check", status=0)
