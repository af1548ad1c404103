import subprocess
import sys

import pytest
import torch

from opgrip.replay.modes import Task, Tuning, find_mode
from opgrip.replay.operators import Unsupported

tvm = pytest.importorskip("tvm")


def run(function, *args, **about):
    program = find_mode("tvm")[0].make(Task(function, args, {}, **about))
    given, _ = program.enter((args, {}))
    return program.leave(program.function(*given))


def decode(anchors, deltas):
    sizes = anchors[:, 2:] - anchors[:, :2]
    centers = anchors[:, :2] + 0.5 * sizes + deltas[:, :2] * sizes
    half = 0.5 * sizes * deltas[:, 2:].clamp(max=4.0).exp()
    return torch.cat([centers - half, centers + half], dim=1)


CASES = {
    "an operator": (torch.ops.aten.add.Tensor, (torch.randn(3, 4), torch.randn(4))),
    "a function of several operators": (decode, (torch.rand(5, 4), torch.rand(5, 4))),
    "integers of 64 bits": (torch.ops.aten.mul.Tensor, (torch.arange(4) + 2**40, torch.arange(4))),
    "booleans": (torch.ops.aten.logical_not.default, (torch.tensor([True, False]),)),
    "a transposed argument": (torch.ops.aten.relu.default, (torch.randn(3, 4).t(),)),
    "an argument that asks for gradients": (torch.ops.aten.relu.default, (torch.randn(3, requires_grad=True),)),
    "an argument that begins anywhere in memory": (torch.ops.aten.exp.default, (torch.randn(65)[1:],)),
    "several results": (torch.ops.aten.topk.default, (torch.randperm(9).float(), 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_it_gives_eagers_numbers(name):
    function, args = CASES[name]
    results = run(function, *args)
    with torch.no_grad():
        expected = function(*args)
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    assert not results.arguments
    torch.testing.assert_close(list(results.outputs), expected)


def test_what_a_call_writes_comes_back_as_its_argument():
    given = torch.ones(3)
    results = run(torch.ops.aten.add_.Tensor, given, torch.ones(3), mutates=True)
    torch.testing.assert_close(results.arguments[0], torch.full((3,), 2.0))
    assert given.tolist() == [1.0, 1.0, 1.0]


def test_an_operator_that_it_cannot_convert_says_so_in_one_line():
    with pytest.raises(Unsupported, match=r"^TVM cannot convert it: .*upsample_nearest2d\.default.*$"):
        run(torch.ops.aten.upsample_nearest2d.default, torch.randn(1, 2, 3, 3), [6, 6])


def test_what_was_compiled_is_loaded_the_next_time(tmp_path, monkeypatch):
    args = (torch.randn(3), torch.randn(3))
    first = run(torch.ops.aten.sub.Tensor, *args, store=tmp_path)
    assert list(tmp_path.glob("*.so"))
    monkeypatch.setattr(tvm, "compile", None)
    second = run(torch.ops.aten.sub.Tensor, *args, store=tmp_path)
    torch.testing.assert_close(first.outputs, second.outputs)


def test_each_program_has_its_own_number_of_threads(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from opgrip.replay.modes import Task, find_mode\n"
        "args = (torch.ones(4),)\n"
        "programs = [find_mode('tvm')[0].make(Task(torch.relu, args, {}, threads=n)) for n in (2, 1)]\n"
        "import tvm\n"
        "for program, threads in (programs[0], 2), (programs[1], 1), (programs[0], 2):\n"
        "    program.function(*program.enter((args, {}))[0])\n"
        "    assert tvm.get_global_func('runtime.NumThreads')() == threads\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_unknown_tuner_is_named():
    with pytest.raises(Exception, match="no tuner 'annealing': there are evolutionary"):
        run(torch.relu, torch.ones(3), tuning=Tuning(2, "annealing"))


@pytest.mark.slow
def test_a_search_is_kept_and_not_made_twice(tmp_path, monkeypatch):
    pytest.importorskip("psutil")
    pytest.importorskip("cloudpickle")
    ffi = pytest.importorskip("tvm_ffi")
    if ffi.__version__.startswith("0.1.15"):
        pytest.skip("this tvm-ffi ends the process where TVM writes a program down")
    from tvm.s_tir.meta_schedule import relax_integration

    args = (torch.randn(32, 32), torch.randn(32, 32))
    first = run(torch.matmul, *args, store=tmp_path, tuning=Tuning(2, "replay-trace"))
    assert next(tmp_path.rglob("database_tuning_record.json")).read_text().strip()
    next(tmp_path.glob("*.so")).unlink()
    monkeypatch.setattr(relax_integration, "tune_relax", None)
    second = run(torch.matmul, *args, store=tmp_path, tuning=Tuning(2, "replay-trace"))
    torch.testing.assert_close(first.outputs[0], args[0] @ args[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(first.outputs, second.outputs)
