"""Requests that no row fulfilled: one line reports them, and the exit status is 1."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import make_row
from programs import run_command

from opgrip.replay.replay_options import make_parser
from opgrip.replay.reports.fulfilment import unfulfilled
from opgrip.replay.results.results import CONTENDED, FAILED, OK, SKIPPED, UNSUPPORTED, WRONG, Result

RAN = make_row(1, [1.0], op="aten.add.Tensor", cache="program")
LACKING = replace(RAN, status=UNSUPPORTED, error="it cannot")


def lines_of(rows: list[Result], *words: str) -> list[str]:
    return unfulfilled(make_parser().parse_args(["trace.jsonl", *words]), rows)


@pytest.mark.parametrize(
    ("words", "other", "line"),
    [
        (["--backward"], replace(LACKING, direction="backward"), "nothing ran with --backward: it cannot"),
        (["--backward"], RAN, "nothing ran with --backward: no case is of a forward call"),
        (["--mode", "eager,jit"], replace(LACKING, mode="jit"), "nothing ran with --mode jit: it cannot"),
        (["--dtype", "float64"], replace(LACKING, dtype="float64"), "nothing ran with --dtype float64: it cannot"),
        (["--threads", "2,4"], replace(RAN, threads=2), "nothing ran with --threads 4: no row belongs to it"),
        (["--batch-scale", "1,4"], replace(LACKING, batch_scale=4), "nothing ran with --batch-scale 4: it cannot"),
        (
            ["--values", "recorded,zeros"],
            replace(LACKING, values="zeros"),
            "nothing ran with --values zeros: it cannot",
        ),
        (["--streams", "1,2"], replace(LACKING, streams=2), "nothing ran with --streams 2: it cannot"),
        (["--cache", "program,cold"], replace(LACKING, cache="cold"), "nothing ran with --cache cold: it cannot"),
        (
            ["--mode", "eager,tvm", "--tune", "4"],
            replace(RAN, mode="tvm"),
            "nothing ran with --tune: no row belongs to it",
        ),
        (["--energy"], RAN, "nothing ran with --energy: no row has an energy"),
        (["--nsys"], RAN, "nothing ran with --nsys: it added nothing to any row"),
        (["--roofline"], RAN, "nothing ran with --roofline: it added nothing to any row"),
        (["--op", "aten.add*", "--op", "aten.mm"], RAN, "nothing ran with --op aten.mm: no case matches it"),
    ],
)
def test_request_that_no_row_fulfilled_is_reported_in_one_line(words: list[str], other: Result, line: str) -> None:
    assert lines_of([RAN, other], *words) == [line]


@pytest.mark.parametrize("status", [OK, WRONG, CONTENDED])
def test_request_is_fulfilled_by_a_row_that_ran(status: str) -> None:
    rows = [RAN, replace(LACKING, direction="backward"), replace(RAN, direction="backward", status=status)]
    assert not lines_of(
        rows, "--backward", "--mode", "eager", "--dtype", "float32", "--top", "1", "--op", "x", "--op", "y"
    )


def test_run_without_a_row_that_ran_is_reported_in_one_line() -> None:
    assert lines_of([LACKING, replace(LACKING, status=FAILED)], "--backward") == ["no case ran: it cannot"]
    assert lines_of([replace(LACKING, status=SKIPPED, error="it raised")]) == ["no case ran: it raised"]
    several = [LACKING, LACKING, replace(LACKING, error="it may not")]
    assert lines_of(several) == ["no case ran: it cannot (2 of 3 rows)"]


def test_exit_status_is_1_if_no_row_fulfilled_a_request(tmp_path: Path) -> None:
    text = "Operator: aten.argmax.default\ncnt: 1, ((T([2, 3], i64),), {})\n"
    (tmp_path / "inputs.txt").write_text(text, encoding="utf-8")
    words = ("opreplay", "inputs.txt", "--iterations", "2", "--warmup", "0")
    assert run_command(*words, cwd=tmp_path).returncode == 0
    done = run_command(*words, "--backward", cwd=tmp_path)
    assert done.returncode == 1
    assert "opreplay: nothing ran with --backward: not differentiable" in done.stderr
