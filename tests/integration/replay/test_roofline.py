"""Tests of the roofline: work of calls, peaks of the machine, and the limiting resource of a call."""

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from programs import refusal, run_command, succeed
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from opgrip.display.figures import write_figure
from opgrip.errors import UserError
from opgrip.platform.peaks import TF32, Level, Peaks, from_json, keep, peaks_path, read_cached_peaks, to_json
from opgrip.platform.precisions import is_tf32
from opgrip.replay import Results
from opgrip.replay.analyses.roofline import BOUNDS, LimitColumns, dtype_of, limit_of, measuring, nearness, with_limits
from opgrip.replay.analyses.roofline.drawing import draw
from opgrip.replay.cases.cases import Case
from opgrip.replay.operators.work import counted, work_of
from opgrip.replay.results.results import OK, Result

aten = torch.ops.aten
FAST = ("--iterations", "1", "--warmup", "0")
SVG = "{http://www.w3.org/2000/svg}"

CEILINGS = Peaks(
    machine=("a processor",),
    device="cpu",
    threads=4,
    levels=(
        Level("L1", 32 << 10, 1, {1: 100.0, 4: 400.0}),
        Level("L2", 1 << 20, 4, {1: 50.0, 4: 80.0}),
        Level("memory", None, 4, {1: 10.0, 4: 20.0}),
    ),
    rates={"float32": {1: 100.0, 4: 400.0}, "bfloat16": {1: 200.0, 4: 800.0}},
    launch_us=1.0,
    dispatch_us=0.5,
    torch="2.0",
    time="2026-01-01T00:00:00+00:00",
)


def row_of(**cells: Any) -> Result:
    usual = {"case": 0, "op": "aten.x", "shapes": "", "count": 1, "share": 1.0, "mode": "eager", "device": "cpu"}
    usual |= {"status": "ok", "captured_us": 1.0, "captured_total_us": 1.0, "median_us": 10.0, "bytes_moved": 8}
    return Result(**(usual | cells))


F = 4  # bytes of a float


@pytest.mark.parametrize(
    ("function", "args", "flops", "moved"),
    [
        (aten.mm.default, (torch.ones(4, 5), torch.ones(5, 6)), 2 * 4 * 5 * 6, F * (20 + 30 + 24)),
        (aten.add.Tensor, (torch.ones(8), torch.ones(8)), 8, F * 24),
        (aten.add_.Tensor, (torch.ones(8), torch.ones(8)), 8, F * (2 * 8 + 8)),
        (aten.mul.Tensor, (torch.ones(3, 1).expand(3, 100), 2), 300, F * (3 + 300)),
        (aten.sum.default, (torch.ones(3, 5),), 15, F * 16),
        (aten.view.default, (torch.ones(3, 5), [15]), 0, 0),
        (aten.clone.default, (torch.ones(30)[::3],), 0, F * 20),
        (aten.copy_.default, (torch.ones(7), torch.ones(7)), 0, F * 14),
        (aten.empty.memory_format, ([7],), 0, 0),
        (aten.embedding.default, (torch.ones(1000, 4), torch.arange(3)), 0, F * (12 + 12) + 8 * 3),
        (aten.index_put_.default, (torch.ones(99), [torch.arange(3)], torch.ones(3)), 0, F * 6 + 8 * 3),
        (aten.index_put_.default, (torch.ones(99), [torch.arange(3)], torch.ones(3), True), 3, F * 9 + 8 * 3),
        (aten._softmax.default, (torch.ones(2, 4), 1, False), 5 * 8, F * 16),
        (aten.sort.default, (torch.ones(2, 8),), 2 * 8 * 3, F * 32 + 8 * 16),
        (aten.topk.default, (torch.ones(100), 4), 100 + 4 * 2, F * 104 + 8 * 4),
        (aten.upsample_nearest2d.default, (torch.ones(1, 1, 2, 2), [4, 4]), 0, F * 20),
        (aten.upsample_bilinear2d.default, (torch.ones(1, 1, 2, 2), [4, 4], False), 7 * 16, F * 20),
        (aten.max_pool2d_with_indices.default, (torch.ones(1, 1, 4, 4), [2, 2], [2, 2]), 3 * 4, F * 20 + 8 * 4),
        (aten.native_layer_norm.default, (torch.ones(2, 4), [4], torch.ones(4), None, 1e-5), 56, F * (8 + 4 + 8 + 4)),
        (aten._int_mm.default, (torch.ones(32, 8).char(), torch.ones(8, 16).char()), 2 * 32 * 8 * 16, 384 + F * 512),
        (aten.unfold.default, (torch.ones(10), 0, 5, 1), 0, 0),
        (aten.sum.default, (torch.ones(10).unfold(0, 5, 1),), 30, F * 11),
        (aten.linalg_eigh.default, (torch.eye(3),), None, F * (9 + 9 + 3)),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else None,
)
def test_work_equals_manual_counts(function: Any, args: Any, flops: int | None, moved: int) -> None:
    work = work_of(function, "", args, {}, function(*args))
    assert (work.flops, work.bytes) == (flops, moved)


def test_extension_functions_have_formulas_by_name() -> None:
    boxes, scores = torch.rand(10, 4), torch.rand(10)
    work = work_of(lambda: None, "mmcv._ext:nms", (boxes, scores), {}, torch.arange(4))
    assert work.flops == 13 * (4 * 3 // 2 + 6) + 10 * 4
    assert work.bytes == F * 50 + 8 * 4
    maps, rois, output = torch.rand(1, 2, 64, 64), torch.rand(3, 5), torch.rand(3, 2, 7, 7)
    work = work_of(lambda: None, "mmcv._ext:roi_align_forward", (maps, rois, output), {"sampling_ratio": 2}, None)
    assert work.flops == output.numel() * 4 * 8
    assert work.bytes == F * (2 * output.numel() + rois.numel())


def test_function_has_the_flops_of_its_operators_and_its_own_bytes() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1))
    x = torch.ones(1, 3, 10, 10)
    with torch.no_grad():
        work = counted(net, (x,), {})
        with FlopCounterMode(display=False) as counter:
            given = net(x)
    assert work.flops == counter.get_total_flops()
    assert work.operators == 2
    assert work.bytes == F * (x.numel() + given.numel())
    assert work.dtype == "float32"


@pytest.mark.parametrize(
    ("flops", "size", "dtype", "operators", "threads", "cold", "us", "bound", "level"),
    [
        (0, 0, None, 1, 1, False, 0.5, "launch", "L1"),
        (0, 500_000, None, 1, 1, False, 10.0, "bandwidth", "L2"),
        (0, 500_000, None, 1, 1, True, 50.0, "bandwidth", "memory"),
        # four private caches hold four times as much, a shared one does not
        (0, 100 << 10, None, 1, 4, False, 1.0, "launch", "L1"),
        (0, 4_000_000, None, 1, 4, False, 200.0, "bandwidth", "memory"),
        (1_000_000, 1000, "float32", 1, 1, False, 10.0, "arithmetic", "L1"),
        (1_000_000, 1000, "bfloat16", 1, 1, False, 5.0, "arithmetic", "L1"),
        (1_000_000, 1000, "float32", 1, 2, False, 5.0, "arithmetic", "L1"),
        (1_000_000, 1000, "float32", 11, 1, False, 10.0, "interpreter", "L1"),
        (None, 500_000, "float32", 1, 1, False, 10.0, "bandwidth", "L2"),
    ],
)
def test_limit_is_the_longest_of_three_times(
    flops: int | None,
    size: int,
    dtype: str | None,
    operators: int,
    threads: int,
    cold: bool,
    us: float,
    bound: str,
    level: str,
) -> None:
    limit = limit_of(flops, size, dtype, operators, CEILINGS, threads, cold)
    assert limit.us == pytest.approx(us)
    assert (limit.bound, limit.level) == (bound, level)


def test_row_without_a_time_or_bytes_has_no_limit() -> None:
    rows = [row_of(), row_of(status="failed", median_us=None), row_of(bytes_moved=None), row_of(median_us=0.0)]
    limited = with_limits(rows, CEILINGS, lambda row: 1)
    assert [LimitColumns.of(row).limit_us for row in limited] == [1.0, None, None, None]
    assert LimitColumns.of(limited[0]).of_limit == pytest.approx(0.1)


def test_gain_is_the_time_above_the_limit() -> None:
    rows = [row_of(op="a", count=2, median_us=30.0), row_of(op="b", count=1, median_us=40.0)]
    first, second = nearness(with_limits(rows, CEILINGS, lambda row: 1))
    assert (first.operator, first.share, first.us, first.limit_us) == ("a", 0.6, 60.0, 2.0)
    assert first.gain == pytest.approx(0.58)
    assert second.of_limit == pytest.approx(1 / 40)


def test_peaks_are_cached_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPGRIP_CACHE", str(tmp_path))
    assert read_cached_peaks("cpu") is None
    path = keep(CEILINGS, "cpu")
    assert path.is_relative_to(tmp_path)
    assert read_cached_peaks("cpu") == CEILINGS
    for damaged in ("", "{}", "[]", path.read_text()[:-20], json.dumps({**to_json(CEILINGS), "levels": []})):
        path.write_text(damaged)
        assert read_cached_peaks("cpu") is None


def drawn(rows: list[Result], title: str) -> ElementTree.Element:
    file = io.BytesIO()
    write_figure(lambda: draw(rows, CEILINGS, 1, title), "svg", file)
    return ElementTree.fromstring(file.getvalue())


def parts(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [item for item in root.iter(f"{SVG}g") if str(item.get("id")).startswith(f"{name} ")]


@pytest.mark.slow
def test_drawing_has_a_dot_per_case_peaks_and_operator_names() -> None:
    rows = [
        row_of(op="aten.<&>$x_1$", flops=1000, bytes_moved=100, median_us=20.0, math_dtype="float32"),
        row_of(op="moves", flops=0, bytes_moved=100),
        row_of(op="unknown", flops=None, bytes_moved=10_000_000),
        row_of(op="view", flops=0, bytes_moved=0),
        row_of(op="not timed", status="failed", median_us=None),
    ]
    root = drawn(with_limits(rows, CEILINGS, lambda row: 1), "a & b")
    assert len(parts(root, "dot")) == 4
    assert len(parts(root, "bandwidth")) == len(CEILINGS.levels)
    assert [item.get("id") for item in parts(root, "rate")] == ["rate float32"]
    texts = ["".join(item.itertext()) for item in root.iter(f"{SVG}text")]
    names = sorted(text.split()[1] for text in texts if text.endswith("%"))
    assert names == ["aten.<&>$x_1$", "moves", "unknown", "view"]
    assert {*BOUNDS, "a & b: a processor, 1 thread", "memory 10 GB/s", "float32", "100 Gflop/s"} <= set(texts)
    assert "var(" not in ElementTree.tostring(root, encoding="unicode")


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("OPGRIP_CACHE", str(tmp_path / "cache"))
    keep(CEILINGS, "cpu")
    return dict(os.environ)


@pytest.mark.slow
def test_opreplay_prints_and_draws_the_roofline(detector_trace: Path, tmp_path: Path, measured: dict[str, str]) -> None:
    output = tmp_path / "roofline.svg"
    shown = succeed("opreplay", detector_trace, *FAST, "--top", "40", "--roofline", "-o", output, env=measured)
    assert "measuring" not in shown.stderr
    table = shown.stdout.split("how near the times are to the machine's limit")[1]
    assert "aten.convolution.default" in table
    assert "of the machine's limit for all calls together; bounds: " in table
    dots = parts(ElementTree.parse(output).getroot(), "dot")
    assert f"{len(dots)} cases: {len(dots)} ok" in shown.stderr


@pytest.mark.slow
def test_rows_have_their_limits_and_bounds(detector_trace: Path, tmp_path: Path, measured: dict[str, str]) -> None:
    output = tmp_path / "rows.json"
    words = ("--unit", "module", "--module", "backbone.*", "--top", "2", "--roofline", "-o", output)
    succeed("opreplay", detector_trace, *FAST, *words, env=measured)
    rows = Results.load(output).frame
    assert rows["operators"].max() > 1
    assert (rows["flops"] > 0).all()
    assert rows["bound"].isin(BOUNDS).all()
    assert (rows["of_limit"] == rows["limit_us"] / rows["median_us"]).all()
    assert from_json(json.loads(output.read_text())["ceilings"]) == CEILINGS


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ("-o", "x.svg"),
            "x.svg is for the results of --roofline, which is not given: add --roofline, or end its name in .json",
        ),
        (("--roofline", "-o", "x.svg", "--append"), "rows cannot be added to x.svg: write .json or .csv"),
        (("--energy",), "--energy needs an NVIDIA GPU, and cpu is not one: remove --energy"),
        (("--sequence", "--roofline"), "--roofline is for single cases: leave it out with --sequence"),
    ],
)
def test_invalid_roofline_output_or_input_is_reported_in_one_line(
    tiny_trace: Path, tmp_path: Path, words: tuple[str, ...], reason: str
) -> None:
    shown = run_command("opreplay", tiny_trace, *words, cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (2, f"opreplay: error: {reason}\n")


def test_opgrip_machine_prints_cached_measurements(tmp_path: Path, measured: dict[str, str]) -> None:
    output = tmp_path / "machine.json"
    shown = run_command("opgrip", "machine", "-o", output, env=measured)
    message = f"opgrip machine: wrote the peak bandwidth and arithmetic rates to {output}\n"
    assert (shown.returncode, shown.stderr) == (0, message)
    assert "a processor" in shown.stdout
    assert "1.00 us for an operator on one element, 0.50 us for a view" in shown.stdout
    assert from_json(json.loads(output.read_text())) == CEILINGS
    assert "--force" in refusal("opgrip", "machine", "-o", output, env=measured)


@pytest.mark.slow
def test_machine_is_measured_again_and_the_file_is_kept(tmp_path: Path, measured: dict[str, str]) -> None:
    shown = succeed("opgrip", "machine", "--again", env=measured)
    assert "saved the peak bandwidths and arithmetic rates of cpu in" in shown.stderr
    found = read_cached_peaks("cpu")
    assert found is not None
    assert found != replace(CEILINGS, time=found.time)
    assert found.levels[-1].name == "memory"
    assert found.rates["float32"][1] > 0
    assert str(peaks_path("cpu")) in shown.stderr
    # in the file, no level has more bandwidth than the one before it
    for near, far in zip(found.levels, found.levels[1:], strict=False):
        assert all(near.bandwidth[count] >= far.bandwidth[count] for count in near.bandwidth)


CONVOLUTION, PRODUCT, ADDITION = "aten.convolution.default", "aten.mm.default", "aten.add.Tensor"

GPU = Peaks(
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


def gpu_row(**cells: Any) -> Result:
    usual = {"case": 0, "op": PRODUCT, "shapes": "", "count": 1, "share": 1.0, "mode": "eager", "device": "cuda:0"}
    usual |= {"status": OK, "captured_us": 1.0, "captured_total_us": 1.0, "median_us": 10.0, "method": "discrete"}
    usual |= {"bytes_moved": 1000, "flops": 8_000_000, "math_dtype": "float32"}
    return Result(**(usual | cells))


def gpu_limit(row: Result) -> LimitColumns:
    [limited] = with_limits([row], GPU, lambda row: 1)
    return LimitColumns.of(limited)


@pytest.mark.parametrize(
    ("operator", "context", "is_rounded"),
    [
        # by default cuDNN uses TF32, and matrix products do not
        (CONVOLUTION, {}, True),
        (PRODUCT, {}, False),
        (CONVOLUTION, {"cudnn_tf32": False}, False),
        (CONVOLUTION, {"cudnn_tf32": True, "fp32_precision": "cudnn.conv:ieee"}, False),
        (CONVOLUTION, {"cudnn": False, "matmul_precision": "high"}, True),
        (PRODUCT, {"matmul_precision": "high"}, True),
        (PRODUCT, {"matmul_precision": "highest", "cudnn_tf32": True}, False),
        (PRODUCT, {"fp32_precision": "cuda.matmul:tf32"}, True),
        (PRODUCT, {"fp32_precision": "mkldnn.matmul:tf32"}, False),
        # a subgraph case has operators of both kinds
        ("backbone.layer1", {}, True),
    ],
)
def test_settings_determine_whether_tf32_is_used(operator: str, context: dict[str, Any], is_rounded: bool) -> None:
    assert is_tf32(operator, context) is is_rounded


def test_convolution_is_compared_with_tf32_and_product_with_float32() -> None:
    rows = [gpu_row(case=0, op=CONVOLUTION), gpu_row(case=1), gpu_row(case=2, math_dtype="float64")]

    class Workload:
        cases: tuple[Case, ...] = ()

    limited = with_limits(rows, GPU, lambda row: 1, dtype_of(Workload()))  # type: ignore[arg-type]
    assert [LimitColumns.of(row).limit_us for row in limited] == [10.0, 80.0, 80.0]


def test_float8_is_compared_only_with_its_own_peak() -> None:
    # all variants of the format have the same peak
    assert gpu_limit(gpu_row(math_dtype="float8_e5m2")).limit_us == 4.0
    assert gpu_limit(gpu_row(math_dtype="float8_e5m2", flops=32_000_000)).limit_us == 10.0
    without = replace(GPU, rates={"float32": {1: 100.0}})
    assert without.rate("float8_e5m2", 1) is None
    assert without.rate(TF32, 1) == without.rate("float32", 1) == 100.0
    assert from_json(to_json(GPU)) == GPU


@pytest.mark.parametrize(
    ("cells", "bound"),
    [
        ({}, "launch"),
        ({"method": "events"}, "bandwidth"),
        ({"mode": "cudagraph"}, "bandwidth"),
        ({"operators": 9}, "interpreter"),
        ({"operators": 9, "mode": "reduce-overhead"}, "bandwidth"),
    ],
)
def test_time_without_a_launch_is_not_launch_bound(cells: dict[str, Any], bound: str) -> None:
    assert gpu_limit(gpu_row(flops=0, bytes_moved=1000, **cells)).bound == bound


def test_call_without_device_work_has_no_device_limit() -> None:
    view = gpu_row(flops=0, bytes_moved=0, method="events")
    assert gpu_limit(view) == LimitColumns()


def test_implausible_rate_is_neither_cached_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(GPU, rates={**GPU.rates, "bfloat16": {1: 0.23}, "float8_e4m3fn": {1: 1_384_750.0}})
    monkeypatch.setattr(measuring, "_measure", lambda device, tell: wrong)
    with pytest.raises(UserError, match=r"0\.23 Gflop/s for bfloat16 and 1,384,750\.00 for float8_e4m3fn"):
        measuring.measure("cuda")
    with pytest.raises(ValueError, match="bfloat16"):
        from_json(to_json(wrong))
    # without instructions for it, a processor may be that slow
    slow = replace(wrong, device="cpu")
    monkeypatch.setattr(measuring, "_measure", lambda device, tell: slow)
    assert measuring.measure("cpu") is slow
