"""Amount of work that is compiled concurrently before anything is timed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from settings import settings_of

from opgrip.replay.cases.functions import function_case
from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.run.request import RunLimits
from opgrip.replay.run.workload import describe_failure
from opgrip.replay.workers.scheduling import in_parts

GB = 10**9
CASE = function_case(torch.relu, [torch.ones(3)])


def parts_of(device: str, free_bytes: int | None, jobs: int, *modes: str) -> list[tuple[list[str], int]]:
    settings = settings_of(mode=list(modes), cache="warm")
    settings = replace(settings.with_request(limits=RunLimits(memory_limit=free_bytes)), device=device)
    rows = [(CASE, way) for way in settings.variants(CASE) if way.mode != "eager"]
    return [([way.mode for _, way in part], count) for part, count in in_parts(rows, settings, jobs)]


@pytest.mark.parametrize(
    ("device", "free_bytes", "jobs", "processes"),
    [
        ("cpu", 2 * GB, 64, 64),
        ("cuda", 80 * GB, 64, 4),
        ("cuda:1", 80 * GB, 2, 2),
        ("cuda", 5 * GB, 64, 3),
        ("cuda", GB // 2, 64, 1),
        ("xpu", 80 * GB, 64, 4),
        ("cuda", None, 64, 4),
    ],
)
def test_number_of_concurrent_compilers_follows_device_memory(
    device: str, free_bytes: int | None, jobs: int, processes: int
) -> None:
    assert parts_of(device, free_bytes, jobs, "compile", "jit") == [(["compile", "jit"], processes)]


def test_autotuning_modes_compile_alone_on_an_accelerator() -> None:
    modes = ("compile-max", "compile")
    assert parts_of("cuda", 80 * GB, 8, *modes) == [(["compile"], 4), (["compile-max"], 1)]
    assert parts_of("cuda", 80 * GB, 8, "compile-max") == [(["compile-max"], 1)]
    assert parts_of("cpu", 80 * GB, 8, *modes) == [(list(modes), 8)]


def test_wrapped_out_of_memory_error_is_recognized() -> None:
    error = Unsupported("it cannot be compiled")
    assert describe_failure(error)[0] == "unsupported"
    error.__cause__ = RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert describe_failure(error) == ("failed", "out of memory: Unsupported: it cannot be compiled")


@pytest.mark.parametrize(
    "message",
    [
        "roi_align_forward_impl: implementation for device xpu:0 not found.\n",
        "Not compiled with GPU support",
        "Cannot access accelerator device when none is available.",
    ],
)
def test_extension_without_a_kernel_for_the_device_is_unsupported(message: str) -> None:
    assert describe_failure(RuntimeError(message)) == ("unsupported", f"RuntimeError: {message.strip()}")
