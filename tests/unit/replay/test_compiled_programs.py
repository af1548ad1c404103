"""Cache of compiled programs, requests that share an entry, and the work that is compiled concurrently."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from settings import settings_of

from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.functions import function_case
from opgrip.replay.cases.selection import FORWARD, Point, Variant
from opgrip.replay.operators.contexts import restored
from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.run.programs import PARTIAL, remove_partial
from opgrip.replay.run.request import RunLimits
from opgrip.replay.run.scheduling import in_parts
from opgrip.replay.run.workload import describe_failure, key_of
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import OPERATOR, Signature

VECTOR = TensorSpec((4,), (1,), torch.float32, "cpu", values=3)
USUAL = Variant(1, "recorded", FORWARD, "aot")


def case(context: dict[str, object] | None = None, **about: object) -> Case:
    signature = Signature(7, OPERATOR, "aten.mul.Tensor", (VECTOR, 2), {}, outputs=VECTOR)
    return Case(replace(signature, **about), {}, 1, 1.0, 1.0, 1.0, context=context or {})  # type: ignore[arg-type]


def key(tmp_path: Path, of: Case, way: Variant = USUAL, **options: object) -> str | None:
    wanted = settings_of(mode=["eager", "aot"], store=tmp_path, **options)
    with restored(wanted.context_of(of, way)):
        return key_of(of, way, wanted)


def test_same_call_of_another_trace_has_the_same_program_key(tmp_path: Path) -> None:
    moved = case(number=9, args=(replace(VECTOR, values=None), 2))
    assert key(tmp_path, moved) == key(tmp_path, case())


@pytest.mark.parametrize(
    ("of", "way"),
    [
        (case(args=(replace(VECTOR, shape=(5,)), 2)), USUAL),
        (case(args=(VECTOR, 3)), USUAL),
        (case(args=(VECTOR, 2.0)), USUAL),
        (case(op="aten.div.Tensor"), USUAL),
        (case(context={"inference": True}), USUAL),
        (case(context={"default_dtype": "float64"}), USUAL),
        (case(), replace(USUAL, mode="compile")),
        (case(), replace(USUAL, direction="backward")),
        (case(), replace(USUAL, point=Point(threads=torch.get_num_threads() + 1))),
    ],
)
def test_another_call_or_setting_has_another_program_key(tmp_path: Path, of: Case, way: Variant) -> None:
    assert key(tmp_path, of, way) != key(tmp_path, case())


def test_programs_of_functions_that_may_change_are_not_cached(tmp_path: Path) -> None:
    assert key(tmp_path, function_case(lambda x: x + 1, (torch.ones(2),))) is None


def test_cache_folders_of_ended_processes_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    lives = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for pid in (ended.pid, lives.pid):
            (tmp_path / "ab" / f"{PARTIAL}{pid}-x").mkdir(parents=True)
        (tmp_path / "ab" / "whole").mkdir()
        remove_partial(tmp_path)
        assert {path.name for path in (tmp_path / "ab").iterdir()} == {f"{PARTIAL}{lives.pid}-x", "whole"}
    finally:
        lives.kill()
        lives.wait()


def test_failing_function_case_counts_as_mutating() -> None:
    def fails(x: torch.Tensor) -> None:
        raise ValueError("planted")

    case = function_case(fails, (torch.ones(2),))
    assert case.operator is not None
    assert case.operator.mutates


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
