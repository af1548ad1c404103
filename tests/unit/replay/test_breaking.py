"""Functions that compilers fail on, under all modes of this machine: each row has a correct status."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import pandas as pd
import pytest
from breaking_functions import BREAKING
from optional import needs_mode
from programs import ROOT, SUPPORT_PATH, run_python
from versions import TORCH

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


def test_program_that_freezes_values_is_refused(quick_rows: pd.DataFrame) -> None:
    jit = quick_rows[quick_rows["mode"] == "jit"].set_index("op")
    assert set(jit.loc[list(FROZEN)]["status"]) == {"unsupported"}
    assert jit.loc["branch_on_a_value"]["note"] == "scripted"


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
