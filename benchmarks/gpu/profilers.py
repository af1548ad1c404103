"""Check NVIDIA's profilers against torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpu.kernels import kernel_names, kernel_us, kernels_of
from gpu.programs import SHIPPED, capture_calls, expect_ok, replay_rows, row_of
from gpu.reports import NCU, NSYS, find_binary, keep_small
from gpu.step import NotHereError, Place, Step, expect, expect_between
from opgrip.errors import UserError
from opgrip.replay.analyses.ncu.ncu import NcuColumns
from opgrip.replay.analyses.nsys import NsysColumns
from opgrip.replay.results.results import RAN, UNSUPPORTED, Result
from opgrip.replay.timing.ranges import check_ranges

NEAR = 0.3  # relative difference allowed between two profilers
TIMER_US = 1.0
NCU_FACTOR = 3.0  # factor allowed for ncu's times, because it empties caches before a kernel
NOT_ALLOWED = ("ERR_NVGPUCTRPERM", "permission")
SIZES = 35  # sizes for each of four operators: 140 cases, more than one window of nsys


def check_nsys(place: Place) -> None:
    """Check the kernels that `--nsys` reports for a matrix product, and their time."""
    rows, expected_us, names = _profiled_product(place, NSYS, nsys=True)
    columns = NsysColumns.of(row_of(rows, "aten.mm.default"))
    place.note(nsys_gpu_us=columns.nsys_gpu_us, kernel_us=expected_us, kernels=columns.nsys_kernels)
    expect(columns.nsys_gpu_us is not None, "nsys sees no kernels of a product")
    _expect_kernels(columns.nsys_kernels, names)
    us = columns.nsys_gpu_us or 0.0
    expect_between(us, (1 - NEAR) * expected_us, (1 + NEAR) * expected_us + TIMER_US, "nsys_gpu_us")


def check_windows(place: Place) -> None:
    """Check that each of 140 cases, which nsys sees in several windows, has its operator's kernels."""
    _need(NSYS)
    device = place.device
    operators: dict[str, Callable[[torch.Tensor], object]] = {
        "aten.sin.default": torch.sin,
        "aten.sum.default": torch.sum,
        "aten.cat.default": lambda x: torch.cat([x, x]),
        "aten._softmax.default": lambda x: torch.softmax(x, 0),
    }
    tensors = [torch.rand(4096 + 16 * place, device=device) for place in range(SIZES)]
    names = {
        name: kernel_names(kernels_of(lambda run=run: [run(x) for x in tensors]))  # type: ignore[misc]
        for name, run in operators.items()
    }
    calls = [lambda run=run, x=x: run(x) for x in tensors for run in operators.values()]
    trace = capture_calls(place, *calls, repeats=1)
    rows = replay_rows(place, trace, nsys=True, output=place.folder / "windows.json", nsys_iterations=3)
    place.note(rows=len(rows))
    expect_ok(rows)
    expect(len(rows) == len(calls), f"there are {len(rows)} rows of {len(calls)} calls")
    for row in rows:
        _expect_kernels(NsysColumns.of(row).nsys_kernels, names[row.op], row)


def check_nsys_of_graphs(place: Place) -> None:
    """Check that `--nsys` reports the kernels in a CUDA graph individually."""
    rows, _, names = _profiled_product(place, NSYS, nsys=True, mode=["cudagraph"])
    row = row_of(rows, "aten.mm.default", "cudagraph")
    place.note(kernels=NsysColumns.of(row).nsys_kernels)
    expect_ok([row])
    _expect_kernels(NsysColumns.of(row).nsys_kernels, names, row)


def check_nsys_of_shipped(place: Place) -> None:
    """Check that no top case of the shipped trace fails under the profiler, which must see kernels; keep its report."""
    _need(NSYS)
    _of_shipped(place, NSYS, nsys=True)


def check_ncu(place: Place) -> None:
    """Check the kernels that `--ncu` reports for a matrix product, and roughly their time."""
    rows, expected_us, names = _profiled_product(place, NCU, ncu=True)
    columns = NcuColumns.of(row_of(rows, "aten.mm.default"))
    place.note(ncu_us=columns.ncu_us, kernel_us=expected_us, kernels=columns.ncu_kernels)
    expect(columns.ncu_us is not None, "ncu sees no kernels of a product")
    expect(columns.ncu_launches == sum(names.values()), f"ncu sees {columns.ncu_kernels}, torch.profiler {names}")
    us = columns.ncu_us or 0.0
    expect_between(us, expected_us / NCU_FACTOR, expected_us * NCU_FACTOR, "ncu_us")


def check_ncu_of_shipped(place: Place) -> None:
    """Check that no top case of the shipped trace fails under the profiler, which must see kernels; keep its report."""
    _need(NCU)
    _of_shipped(place, NCU, ncu=True, ncu_iterations=2)


def _profiled_product(place: Place, profiler: str, **options: Any) -> tuple[list[Result], float, dict[str, int]]:
    """Return the rows of a replay of a matrix product under a profiler, and by torch's profiler the kernels' time in us
    and their names with counts.

    place : device, and folder for the trace and the results
    profiler : command of the profiler, such as `nsys`
    options : further arguments of the replay
    """
    _need(profiler)
    x = torch.rand(1024, 1024, device=place.device)
    names = kernel_names(kernels_of(lambda: torch.mm(x, x)))
    us = kernel_us(lambda: torch.mm(x, x))
    trace = capture_calls(place, lambda: torch.mm(x, x))
    rows = _profiled(place, trace, output=place.folder / "product.json", **options)
    return rows, us, names


def _of_shipped(place: Place, profiler: str, **options: Any) -> None:
    rows = _profiled(place, SHIPPED, top=place.top, output=place.folder / f"{profiler}.json", **options)
    columns = NsysColumns if profiler == NSYS else NcuColumns
    keep_small(profiler, place.folder)
    seen = [row for row in rows if getattr(columns.of(row), f"{profiler}_launches")]
    place.note(rows=len(rows), with_kernels=len(seen))
    expect(seen, f"{profiler} saw no kernels of {len(rows)} cases")
    failed = [row.op for row in rows if row.status not in (*RAN, UNSUPPORTED)]
    expect(not failed, f"cases are neither ok nor unsupported: {failed}")


def _profiled(place: Place, trace: Any, **options: Any) -> list[Result]:
    try:
        return replay_rows(place, trace, **options)
    except UserError as error:
        if any(word in str(error) for word in NOT_ALLOWED):
            raise NotHereError(str(error)) from error
        raise


def _need(profiler: str) -> None:
    try:
        find_binary(profiler)
        check_ranges(profiler)
    except UserError as error:
        raise NotHereError(str(error)) from error


def _expect_kernels(seen: str | None, names: dict[str, int], row: Result | None = None) -> None:
    """Check that each kernel that a profiler names in short form is one that torch's profiler names in full.

    seen : text with the short names; None if the profiler saw no kernels
    names : number of runs by full name
    row : row of the replay, for the message
    """
    of_row = "" if row is None else f" of {row.op} {row.shapes}"
    expect(seen, f"no kernels{of_row} are seen")
    short = _short_names(seen or "")
    strangers = [name for name in short if not any(name in whole for whole in names)]
    expect(not strangers, f"kernels{of_row} are {strangers}, by torch.profiler {list(names)}")


def _short_names(kernels: str) -> Sequence[str]:
    return [kernel.rpartition(" x")[0] for kernel in kernels.split("; ")]


REASON = "Nsight sees only kernels of CUDA"
STEPS = (
    Step("--nsys against torch.profiler", check_nsys, 120.0, REASON),
    Step("--nsys of more cases than a window holds", check_windows, 180.0, REASON),
    Step("--nsys of CUDA graphs", check_nsys_of_graphs, 120.0, REASON),
    Step("--nsys of trace:faster_rcnn", check_nsys_of_shipped, 180.0, REASON),
    Step("--ncu against torch.profiler", check_ncu, 120.0, REASON),
    Step("--ncu of trace:faster_rcnn", check_ncu_of_shipped, 240.0, REASON),
)
