"""Tests of replay: names are looked up safely, a bad case costs only its row, and only the call is timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from example_trace import write
from settings import rows_of, settings_of

from opgrip.capture import Capture
from opgrip.replay.cases.cases import Selection, make_cases
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.replay.results.results import Result
from opgrip.replay.run.workload import Workload
from opgrip.traces import load
from opgrip.traces.schema.records import EXTENSION, Signature

SETTINGS = settings_of(warmup=1, iterations=3)


def replayed(folder: Path, program: Any, settings: Workload = SETTINGS) -> dict[str, Result]:
    """Return the results of a program's calls, by operator."""
    with Capture(folder / "t.jsonl", extensions=settings.request.inputs.extensions):
        program()
    return {result.op: result for result in rows_of(make_cases(load(folder / "t.jsonl")), settings)}


@pytest.mark.parametrize(
    "program",
    [
        lambda: torch.ones(200, 8).index_select(0, torch.randint(0, 200, (300,))),
        lambda: torch.nn.functional.embedding(torch.randint(0, 50, (40, 9)), torch.randn(50, 4)),
        lambda: torch.nn.functional.embedding_bag(
            torch.randint(0, 50, (400,)), torch.randn(50, 4), torch.arange(0, 400, 4)
        ),
        lambda: torch.nn.functional.cross_entropy(torch.randn(300, 80), torch.randint(0, 80, (300,))),
        lambda: torch.zeros(90, 70).scatter_add_(1, torch.randint(0, 70, (90, 70)), torch.randn(90, 70)),
        lambda: torch.zeros(500).index_put_((torch.randint(0, 500, (900,)),), torch.randn(900), accumulate=True),
        lambda: torch.multinomial(torch.rand(20, 100), 7),
        lambda: torch.nn.functional.ctc_loss(
            torch.randn(20, 2, 9).log_softmax(2),
            torch.randint(1, 9, (2, 5)),
            torch.tensor([20, 20]),
            torch.tensor([5, 4]),
        ),
        lambda: torch.nn.MaxUnpool2d(2)(*torch.nn.MaxPool2d(2, return_indices=True)(torch.randn(1, 2, 16, 16))),
        lambda: torch.segment_reduce(torch.randn(100), "sum", lengths=torch.full((25,), 4)),
    ],
)
def test_operators_that_read_indices_get_valid_ones(tmp_path: Path, program: Any) -> None:
    for result in replayed(tmp_path, program).values():
        assert (result.status, result.error) == ("ok", None)
        assert result.faithful


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("os:system", "is not trusted"),
        ("posix:system", "is not trusted"),
        ("mmcv._ext:__loader__", "has no function|not installed"),
        ("mmcv._ext", "is not a function's name"),
    ],
)
def test_functions_are_found_only_in_trusted_extensions(op: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        find_operator(Signature(0, EXTENSION, op, (), {}))


def test_trusted_extension_functions_replay(tmp_path: Path) -> None:
    import math

    trusted = settings_of(warmup=1, iterations=3, extension="math")
    assert replayed(tmp_path, lambda: math.hypot(3.0, 4.0), trusted)["math:hypot"].status == "ok"


def test_other_output_shapes_are_reported(tmp_path: Path) -> None:
    def program() -> None:
        # value models of elements do not show which rows are equal
        torch.randint(0, 10, (5, 3)).repeat(100, 1).unique(dim=0)

    assert replayed(tmp_path, program)["aten.unique_dim.default"].faithful is False


def test_flops_and_bytes_are_those_of_a_call(tmp_path: Path) -> None:
    row = replayed(tmp_path, lambda: torch.mm(torch.ones(4, 5), torch.ones(5, 6)))["aten.mm.default"]
    assert row.flops == 2 * 4 * 5 * 6
    assert (row.bytes_in, row.bytes_out) == (4 * (4 * 5 + 5 * 6), 4 * 4 * 6)


def test_expanded_elements_are_counted_once(tmp_path: Path) -> None:
    x = torch.ones(3, 1).expand(3, 1000)
    assert replayed(tmp_path, lambda: x.sum())["aten.sum.default"].bytes_in == 4 * 3


def test_calls_inside_an_extension_function_are_not_replayed_twice(tmp_path: Path) -> None:
    cases = make_cases(load(write(tmp_path / "t.jsonl")))
    assert {(case.op, case.count) for case in cases} == {("aten.mul.Tensor", 1), ("mmcv._ext:nms", 1)}


def test_top_cases_are_those_with_the_most_time(detector_trace: Path) -> None:
    trace = load(detector_trace)
    everything, top = make_cases(trace), make_cases(trace, Selection(top=5))
    assert [case.number for case in top] == [case.number for case in everything[:5]]
    longest = trace.calls.groupby("signature")["time_ns"].agg(lambda times: len(times) * times.median()).idxmax()
    assert top[0].number == longest
