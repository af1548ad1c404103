"""Tests of a GPU's limits and peaks that work without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import ROOT

from opgrip.errors import UserError
from opgrip.platform import peaks
from opgrip.platform.peaks import TF32, Level, Peaks, from_json, to_json
from opgrip.platform.precisions import is_tf32
from opgrip.replay.analyses.roofline import LimitColumns, dtype_of, measuring, with_limits
from opgrip.replay.analyses.roofline.measuring import products_of, random_matrices
from opgrip.replay.cases.cases import Case
from opgrip.replay.operators.work import work_of
from opgrip.replay.replay_options import request_with
from opgrip.replay.results.results import OK, Result
from opgrip.replay.run.workload import load_workload

CONVOLUTION, PRODUCT, ADDITION = "aten.convolution.default", "aten.mm.default", "aten.add.Tensor"

ON_GPU = products_of("cuda")
CEILINGS = Peaks(
    machine=("a GPU",),
    device="cuda",
    threads=1,
    levels=(Level("L2", 1 << 20, 1, {1: 100.0}), Level("memory", None, 1, {1: 10.0})),
    rates={"float32": {1: 100.0}, TF32: {1: 800.0}, "float8_e4m3fn": {1: 3200.0}},
    launch_us=4.0,
    dispatch_us=1.0,
    torch="2.13",
    time="2026-01-01T00:00:00+00:00",
)


def row_of(**cells: Any) -> Result:
    usual = {"case": 0, "op": PRODUCT, "shapes": "", "count": 1, "share": 1.0, "mode": "eager", "device": "cuda:0"}
    usual |= {"status": OK, "captured_us": 1.0, "captured_total_us": 1.0, "median_us": 10.0, "method": "discrete"}
    usual |= {"bytes_moved": 1000, "flops": 8_000_000, "math_dtype": "float32"}
    return Result(**(usual | cells))


def limit_of(row: Result) -> LimitColumns:
    [limited] = with_limits([row], CEILINGS, lambda row: 1)
    return LimitColumns.of(limited)


@pytest.mark.parametrize(
    ("operator", "context", "is_rounded"),
    [
        # by default cuDNN uses TF32, and matrix products do not
        (CONVOLUTION, {}, True),
        (PRODUCT, {}, False),
        (CONVOLUTION, {"cudnn_tf32": False}, False),
        (CONVOLUTION, {"cudnn_tf32": False, "matmul_precision": "high"}, False),
        (CONVOLUTION, {"cudnn_tf32": True, "fp32_precision": "cudnn.conv:ieee"}, False),
        (CONVOLUTION, {"cudnn": False}, False),
        (CONVOLUTION, {"cudnn": False, "matmul_precision": "high"}, True),
        ("aten._cudnn_rnn.default", {"fp32_precision": "cudnn.rnn:none"}, False),
        (PRODUCT, {"matmul_precision": "high"}, True),
        (PRODUCT, {"matmul_precision": "medium"}, True),
        (PRODUCT, {"matmul_precision": "highest", "cudnn_tf32": True}, False),
        (PRODUCT, {"fp32_precision": "cuda.matmul:tf32"}, True),
        (PRODUCT, {"fp32_precision": "mkldnn.matmul:tf32"}, False),
        # a subgraph case has operators of both kinds
        ("backbone.layer1", {}, True),
        ("backbone.layer1", {"cudnn_tf32": False}, False),
    ],
)
def test_settings_determine_whether_tf32_is_used(operator: str, context: dict[str, Any], is_rounded: bool) -> None:
    assert is_tf32(operator, context) is is_rounded


def test_convolution_is_compared_with_tf32_and_product_with_float32() -> None:
    rows = [row_of(case=0, op=CONVOLUTION), row_of(case=1), row_of(case=2, math_dtype="float64")]

    class Workload:
        cases: tuple[Case, ...] = ()

    limited = with_limits(rows, CEILINGS, lambda row: 1, dtype_of(Workload()))  # type: ignore[arg-type]
    assert [LimitColumns.of(row).limit_us for row in limited] == [10.0, 80.0, 80.0]


def test_other_accelerators_have_no_tf32() -> None:
    class Workload:
        cases: tuple[Case, ...] = ()

    row = row_of(op=CONVOLUTION, device="xpu:0")
    assert dtype_of(Workload())(row) == "float32"  # type: ignore[arg-type]
    assert TF32 not in products_of("xpu")
    assert {"bfloat16", "float16", "float8_e4m3fn", TF32} <= products_of("cuda").keys()


def test_cases_are_compared_with_the_peak_of_their_settings(tiny_trace: Path) -> None:
    loaded = load_workload(request_with(tiny_trace, top=1))
    [case] = loaded.cases
    exact, rounded = ({"cudnn_tf32": allowed, "matmul_precision": "highest"} for allowed in (False, True))
    row = row_of(case=case.number, op=CONVOLUTION)
    dtypes = [dtype_of(replace(loaded, cases=[replace(case, context=context)]))(row) for context in (exact, rounded)]
    assert dtypes == ["float32", TF32]


def test_float8_is_compared_only_with_its_own_peak() -> None:
    # all variants of the format have the same peak
    assert limit_of(row_of(math_dtype="float8_e5m2")).limit_us == 4.0
    assert limit_of(row_of(math_dtype="float8_e5m2", flops=32_000_000)).limit_us == 10.0
    without = replace(CEILINGS, rates={"float32": {1: 100.0}})
    assert without.rate("float8_e5m2", 1) is None
    assert without.rate(TF32, 1) == without.rate("float32", 1) == 100.0
    assert from_json(to_json(CEILINGS)) == CEILINGS


def test_eight_bit_product_is_counted_in_its_input_dtype() -> None:
    matrix, one = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    args, wider = (matrix, matrix.t(), one, one), torch.ones(16, 16, dtype=torch.bfloat16)
    work = work_of(torch.ops.aten._scaled_mm.default, "", args, {"out_dtype": torch.bfloat16}, wider)
    assert work.dtype == "float8_e4m3fn"
    numbers = torch.ones(32, 8).char(), torch.ones(8, 16).char()
    assert work_of(torch.ops.aten._int_mm.default, "", numbers, {}, torch.ones(32, 16).int()).dtype == "int8"


@pytest.mark.parametrize(
    ("cells", "bound"),
    [
        ({}, "launch"),
        ({"method": "continuous"}, "launch"),
        ({"method": "events"}, "bandwidth"),
        ({"method": "graph"}, "bandwidth"),
        ({"mode": "cudagraph"}, "bandwidth"),
        ({"operators": 9}, "interpreter"),
        ({"operators": 9, "method": "events"}, "interpreter"),
        ({"operators": 9, "method": "graph"}, "bandwidth"),
        ({"operators": 9, "mode": "reduce-overhead"}, "bandwidth"),
    ],
)
def test_time_without_a_launch_is_not_launch_bound(cells: dict[str, Any], bound: str) -> None:
    assert limit_of(row_of(flops=0, bytes_moved=1000, **cells)).bound == bound


def test_call_without_device_work_has_no_device_limit() -> None:
    view = row_of(flops=0, bytes_moved=0, method="events")
    assert limit_of(view) == LimitColumns()


@pytest.mark.parametrize("product", ON_GPU.values(), ids=ON_GPU)
def test_peak_products_use_random_values_that_every_dtype_represents(product: measuring.Product) -> None:
    first, second = random_matrices(64, product.dtype, "cpu")
    assert first.dtype is second.dtype is product.dtype
    for matrix in (first, second):
        numbers = matrix.double()
        assert numbers.isfinite().all()
        assert numbers.unique().numel() > 50
    # the oldest supported torch multiplies float8 only on GPUs
    with suppress(NotImplementedError):
        assert product.multiply(first, second).double().isfinite().all()


def test_tf32_is_measured_under_the_setting_that_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    precisions = list[str]()

    def quickest(run: Callable[[], None], enough_s: float) -> float:
        precisions.append(torch.get_float32_matmul_precision())
        return 1.0

    monkeypatch.setattr(measuring, "best_s", quickest)
    for name in ("float32", TF32):
        measuring._matrix_rate(ON_GPU[name], "cpu")
    assert precisions == ["highest", "high"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_cache_bandwidth_is_at_least_the_memory_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"L2": 300.0, "memory": 320.0}
    monkeypatch.setattr(peaks, "last_cache_bytes", lambda device: 4 << 20)
    monkeypatch.setattr(peaks, "free_memory", lambda device: 16 << 30)
    monkeypatch.setattr(peaks, "_on_device", lambda device, name, size, both: Level(name, size, 1, {1: rates[name]}))
    cache, memory = peaks.levels("cuda:0", [1])
    assert (cache.name, cache.size, memory.size) == ("L2", 4 << 20, None)
    assert cache.bandwidth == memory.bandwidth == {1: 320.0}


def test_copies_within_a_cache_are_launched_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, replays, runs = list[object](), list[str](), list[str]()

    class Graph:
        def replay(self) -> None:
            replays.append("replay")

    @contextmanager
    def block(thing: object) -> Iterator[None]:
        captured.append(thing)
        yield

    for name, stand_in in (("CUDAGraph", Graph), ("graph", block), ("device", block)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    launch = peaks._launched_at_once(lambda: runs.append("run"), "cuda:1")
    # on the measured device, first to initialize libraries and then for the graph
    assert captured[0] == "cuda:1"
    assert isinstance(captured[1], Graph)
    assert len(runs) == 2
    launch()
    assert (replays, len(runs)) == (["replay"], 2)


def test_library_loading_is_not_part_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, sizes = [0.0], list[int]()

    def multiply(first: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        # the first product of a process loads a library, and the first one of a size its kernel
        now_s[0] += 1e-6 * len(first) + (len(first) not in sizes) * (0.15 if sizes else 3.0)
        sizes.append(len(first))
        return first

    monkeypatch.setattr(peaks, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(peaks, "REPEAT_S", 0.0)
    monkeypatch.setattr(measuring, "SIZES", (8, 16, 32))
    rate = measuring._matrix_rate(measuring.MatrixProduct(torch.bfloat16, multiply), "cpu")
    assert sorted({*sizes}) == [8, 16, 32]
    assert rate == pytest.approx(2 * 32**3 / 32e-6 / 1e9)


def test_implausible_rate_is_neither_cached_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(CEILINGS, rates={**CEILINGS.rates, "bfloat16": {1: 0.23}, "float8_e4m3fn": {1: 1_384_750.0}})
    monkeypatch.setattr(measuring, "_measure", lambda device, tell: wrong)
    with pytest.raises(UserError, match=r"0\.23 Gflop/s for bfloat16 and 1,384,750\.00 for float8_e4m3fn"):
        measuring.measure("cuda")
    with pytest.raises(ValueError, match="bfloat16"):
        from_json(to_json(wrong))
    # without instructions for it, a processor may be that slow
    slow = replace(wrong, device="cpu")
    monkeypatch.setattr(measuring, "_measure", lambda device, tell: slow)
    assert measuring.measure("cpu") is slow


def test_implausible_first_peaks_of_an_h100_are_refused() -> None:
    file = ROOT / "benchmarks/results/h100/second.jsonl"
    stages = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    (peaks,) = (stage["ceilings"] for stage in stages if "ceilings" in stage)
    with pytest.raises(ValueError, match="bfloat16"):
        from_json(peaks)
    del peaks["rates"]["bfloat16"], peaks["rates"]["float16"]
    assert from_json(peaks).rates["float8_e4m3fn"][1] > 1e6
