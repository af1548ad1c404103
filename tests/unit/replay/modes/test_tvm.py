"""Behaviour specific to TVM."""

from pathlib import Path

import pytest
import torch
from optional import needs_mode, optional
from runtime_calls import run, run_script

from opgrip.replay.modes import Tuning
from opgrip.replay.operators.lookup import Unsupported

tvm = optional("tvm")
pytestmark = needs_mode("tvm")


def test_operator_that_tvm_cannot_convert_is_reported_in_one_line() -> None:
    with pytest.raises(Unsupported, match=r"^TVM cannot convert it: .*upsample_nearest2d\.default.*$"):
        run("tvm", torch.ops.aten.upsample_nearest2d.default, torch.randn(1, 2, 3, 3), [6, 6])


def test_compiled_program_is_loaded_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = (torch.randn(3), torch.randn(3))
    first = run("tvm", torch.ops.aten.sub.Tensor, *args, store=tmp_path)
    assert list(tmp_path.glob("*.so"))
    monkeypatch.setattr(tvm, "compile", None)
    second = run("tvm", torch.ops.aten.sub.Tensor, *args, store=tmp_path)
    torch.testing.assert_close(first.outputs, second.outputs)


def test_each_program_has_its_number_of_threads(tmp_path: Path) -> None:
    run_script(
        tmp_path,
        "import torch\n"
        "from opgrip.replay.modes import Task, find_mode\n"
        "args = (torch.ones(4),)\n"
        "programs = [find_mode('tvm')[0].make(Task(torch.relu, args, {}, threads=n)) for n in (2, 1)]\n"
        "import tvm\n"
        "for program, threads in (programs[0], 2), (programs[1], 1), (programs[0], 2):\n"
        "    program.function(*program.enter((args, {}))[0])\n"
        "    assert tvm.get_global_func('runtime.NumThreads')() == threads\n",
    )


@pytest.mark.slow
def test_tuning_result_is_stored_and_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optional("psutil")
    optional("cloudpickle")
    ffi = optional("tvm_ffi")
    if ffi.__version__.startswith("0.1.15"):
        pytest.skip("this tvm-ffi ends the process where TVM writes a program down")
    from tvm.s_tir.meta_schedule import relax_integration

    args = (torch.randn(32, 32), torch.randn(32, 32))
    first = run("tvm", torch.matmul, *args, store=tmp_path, tuning=Tuning(2, "replay-trace"))
    assert next(tmp_path.rglob("database_tuning_record.json")).read_text().strip()
    next(tmp_path.glob("*.so")).unlink()
    monkeypatch.setattr(relax_integration, "tune_relax", None)
    second = run("tvm", torch.matmul, *args, store=tmp_path, tuning=Tuning(2, "replay-trace"))
    torch.testing.assert_close(first.outputs[0], args[0] @ args[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(first.outputs, second.outputs)
