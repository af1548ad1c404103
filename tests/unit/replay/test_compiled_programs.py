"""Compiled programs: their cache, what is compiled concurrently, and functions that compilers fail on."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from breaking_functions import BREAKING
from optional import needs_mode
from programs import ROOT, SUPPORT_PATH, run_python
from settings import settings_of
from versions import TORCH

from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.functions import function_case
from opgrip.replay.cases.selection import FORWARD, Point, Variant
from opgrip.replay.operators.contexts import restored
from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.run.programs import PARTIAL, remove_partial
from opgrip.replay.run.request import RunLimits
from opgrip.replay.run.worker import in_parts
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


PROGRAM = ROOT / "tests/support/models/breaking_rows.py"
QUICK = ("jit", "compile:aot_eager")
# Slow modes, without compile-max, which compiles like `compile`, and tensorflow, which is xla.
SLOW = ("compile", "compile-dynamic", "aot", "onnxruntime", "tvm", "xla")
PART = ("loop_over_a_list_of_tensors", "write_into_an_argument", "dicts_in_and_out", "an_error_that_is_caught")
REST = ("rows_by_a_mask", "greedy_suppression", "random_zeros", "an_object_of_the_user")
FROZEN = ("through_numpy", "sizes_out_of_a_tensor", "greedy_suppression")
REFUSED = (*FROZEN, "branch_on_a_value", "unique_values")
# Fewer functions for modes that share a compiler with `compile`, and for XLA; AOTInductor takes longest per function.
IN_PART = {"compile-dynamic": PART, "aot": PART, "xla": PART + REST}

# Programs without the function's `except`: TorchScript's ends the process, AOTInductor's raises.
FAILED = {("jit", "an_error_that_is_caught"), ("aot", "an_error_that_is_caught")}
WRONG = {("tvm", "random_zeros")}  # Known wrong result of a compiler: TVM removes dropout, in training too.
if TORCH < (2, 13):
    # seen with 2.6: dynamo compiles only the body of `try`
    WRONG |= {(mode, "an_error_that_is_caught") for mode in ("compile:aot_eager", "compile", "compile-dynamic")}


def rows_under(*modes: str, functions: Sequence[str] = ()) -> pd.DataFrame:
    environment = {**os.environ, "PYTHONPATH": SUPPORT_PATH}
    done = run_python(PROGRAM, ",".join(modes), *functions, env=environment, timeout=1500, status=0)
    return pd.DataFrame(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def check(rows: pd.DataFrame, functions: Sequence[str]) -> None:
    assert len(rows) == len(functions) * rows["mode"].nunique()
    by_mode = rows.set_index(["mode", "op"])
    assert set(by_mode.loc["eager"]["status"]) == {"ok"}
    assert set(by_mode.index[by_mode["status"] == "wrong"]) <= WRONG
    assert set(by_mode.index[by_mode["status"] == "failed"]) <= FAILED
    assert set(rows["status"]) <= {"ok", "unsupported", "wrong", "failed"}
    errors = rows[rows["status"] != "ok"]["error"]
    assert errors.str.len().gt(5).all()
    assert not errors.str.contains("\n").any()
    assert rows[rows["status"] == "ok"]["first_ms"].gt(0).all()


@pytest.fixture(scope="module")
def quick_rows() -> pd.DataFrame:
    rows = rows_under(*QUICK, functions=REFUSED)
    check(rows, REFUSED)
    return rows


@pytest.mark.slow
def test_every_breaking_function_gets_a_correct_status() -> None:
    check(rows_under(*QUICK), list(BREAKING))


@pytest.mark.slow
def test_program_that_freezes_values_is_refused(quick_rows: pd.DataFrame) -> None:
    jit = quick_rows[quick_rows["mode"] == "jit"].set_index("op")
    assert set(jit.loc[list(FROZEN)]["status"]) == {"unsupported"}
    assert jit.loc["branch_on_a_value"]["note"] == "scripted"


@pytest.mark.slow
def test_function_that_dynamo_leaves_to_eager_is_not_called_compiled(quick_rows: pd.DataFrame) -> None:
    rows = quick_rows[quick_rows["mode"] == "compile:aot_eager"].set_index("op")
    assert "dynamo compiled no part of it" in rows.loc["unique_values"]["error"]
    assert rows.loc["branch_on_a_value"]["note"] == "2 graphs"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", [pytest.param(mode, marks=needs_mode(mode)) for mode in SLOW])
def test_every_breaking_function_gets_a_correct_status_under_a_compiler(mode: str) -> None:
    functions = IN_PART.get(mode, list(BREAKING))
    check(rows_under(mode, functions=functions), functions)
