"""Measurement of a machine's peak rates: the best of several runs, because disturbances only make runs slower."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor

from opgrip.cli.progress import ProgressCallback, ignore_progress
from opgrip.errors import UserError, cause_of
from opgrip.platform.machine import processor
from opgrip.platform.peaks import TF32, Peaks, best_s, find_implausible_rate, levels, no_less
from opgrip.replay.operators.contexts import KINDS, restored
from opgrip.replay.operators.devices import synchronizer
from opgrip.traces.schema.tensor_specs import plain_name

aten = torch.ops.aten
SIZES = (256, 512, 1024, 2048, 4096, 8192)  # sizes of the square matrices
LONGEST_S = 0.12  # time in seconds of a product above which larger matrices are not tried
LAUNCHES = 2000


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """A matrix product whose rate is measured as a peak rate.

    precision : value for `torch.set_float32_matmul_precision` during the product
    """

    dtype: torch.dtype
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm
    precision: str = "highest"


def _integer_product(first: Tensor, second: Tensor) -> Tensor:
    # cuBLAS needs a column-major second matrix to use tensor cores; oneDNN is faster on a row-major one
    product: Tensor = aten._int_mm.default(first, second.t())
    return product


def _scaled_product(first: Tensor, second: Tensor) -> Tensor:
    scale = torch.ones((), device=first.device)
    # _scaled_mm requires a column-major second matrix
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    product: Tensor = aten._scaled_mm.default(first, second.t(), scale, scale, **options)
    return product


# matrix products, by dtype of their arithmetic
PRODUCTS = {
    **{
        plain_name(dtype): MatrixProduct(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    },
    "int8": MatrixProduct(torch.int8, aten._int_mm.default),
}
ON_ACCELERATORS = {
    "int8": MatrixProduct(torch.int8, _integer_product),
    "float8_e4m3fn": MatrixProduct(torch.float8_e4m3fn, _scaled_product),
}
ROUNDED = {TF32: MatrixProduct(torch.float32, precision="high")}  # additional products for accelerators with TF32
# errors that torch and its backends raise for features that a device lacks
NOT_THERE = (RuntimeError, AttributeError, TypeError, AssertionError)


def measure(device: str, on_progress: ProgressCallback = ignore_progress) -> Peaks:
    """Measure the peak rates and bandwidths of a device, which takes about 20 seconds."""
    try:
        ceilings = _measure(device, on_progress)
    except NOT_THERE as error:
        problem = f"the peak rates of {device} cannot be measured: {cause_of(error)}"
        raise UserError(problem, "leave --roofline out, or measure another device") from error
    if implausible := find_implausible_rate(ceilings):
        raise UserError(f"the peak rates of {device} were measured wrongly: {implausible}", "measure again")
    return ceilings


def products_of(kind: str) -> dict[str, MatrixProduct]:
    if kind == "cpu":
        return PRODUCTS
    return PRODUCTS | (ROUNDED if kind in KINDS else {}) | ON_ACCELERATORS


def _measure(device: str, on_progress: ProgressCallback) -> Peaks:
    kind = torch.device(device).type
    threads = sorted({1, len(os.sched_getaffinity(0))}) if kind == "cpu" else [1]
    rates: dict[str, dict[int, float]] = {}
    products = products_of(kind)
    parts = len(threads) * len(products) + 1
    for index, count in enumerate(threads):
        with _threads(count):
            for number, (name, product) in enumerate(products.items(), index * len(products)):
                on_progress(f"products of {name}", number, parts)
                rate = _matrix_rate(product, device)
                if rate is not None:
                    rates.setdefault(name, {})[count] = rate
    on_progress("copies", parts - 1, parts)
    one = torch.zeros(1, device=device)
    return Peaks(
        machine=tuple(processor(device)),
        device=kind,
        threads=threads[-1],
        levels=tuple(levels(device, threads)),
        rates={dtype: no_less(rate_by_threads) for dtype, rate_by_threads in rates.items()},
        launch_us=_launch_us(torch.ops.aten.neg.default, one, device),
        dispatch_us=_launch_us(torch.ops.aten.alias.default, one, device),
        torch=torch.__version__,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _matrix_rate(product: MatrixProduct, device: str) -> float | None:
    best = None
    wait = synchronizer(device)
    for size in SIZES:
        try:
            first, second = random_matrices(size, product.dtype, device)

            def run(first: Tensor = first, second: Tensor = second) -> None:
                product.multiply(first, second)
                wait()

            with restored({"matmul_precision": product.precision}):
                time_s = best_s(run, LONGEST_S)
        except (RuntimeError, TypeError, MemoryError):
            break
        best = max(best or 0.0, 2 * size**3 / time_s / 1e9)
        if time_s * 8 > LONGEST_S:
            break
    return best


def random_matrices(size: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    numbers = torch.randn(2, size, size, generator=torch.Generator().manual_seed(0)).clamp_(-4, 4)
    if dtype is torch.int8:
        numbers *= 31
    first, second = numbers.to(device).to(dtype)
    return first, second


def _launch_us(function: Callable[..., Any], one: torch.Tensor, device: str) -> float:
    wait = synchronizer(device)

    def run() -> None:
        for _ in range(LAUNCHES):
            function(one)
        wait()

    return best_s(run) / LAUNCHES * 1e6


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
