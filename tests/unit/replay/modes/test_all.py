"""Correctness of every mode."""

import re
from time import perf_counter_ns

import pytest
import torch
from optional import needs_mode, optional
from runtime_calls import CALLS, run

from opgrip.replay.modes import Task, find_mode
from opgrip.replay.operators.lookup import Unsupported

slow = pytest.mark.slow
MODES = [
    pytest.param("eager"),
    pytest.param("cpu"),
    pytest.param("jit"),
    pytest.param("compile:aot_eager"),
    pytest.param("compile", marks=slow),
    pytest.param("compile-dynamic", marks=slow),
    pytest.param("aot", marks=slow),
    pytest.param("onnxruntime", marks=needs_mode("onnxruntime")),
    pytest.param("tvm", marks=needs_mode("tvm")),
    pytest.param("xla", marks=needs_mode("xla")),
]
FOR_AOT = ("attention", "booleans", "an argument as it came", "a transposed argument")
WRONG = {("tvm", "a float added to integers")}  # known wrong results of a runtime
# calls that a runtime does not support
REFUSED = {
    ("onnxruntime", "floats of 16 bits"),
    ("onnxruntime", "a conjugate view"),
    ("tvm", "a conjugate view"),
    ("tvm", "no elements"),
    ("aot", "a conjugate view"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", MODES)
def test_mode_returns_the_results_of_eager(mode: str, call: str) -> None:
    if mode == "aot" and call not in FOR_AOT:
        pytest.skip("each takes a C++ compiler seven seconds")
    function, args = CALLS[call]
    try:
        results = run(mode, function, *args)
    except Exception:
        assert (mode, call) in REFUSED
        return
    with torch.no_grad():
        expected = function(*args)
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    assert not results.arguments
    if (mode, call) not in WRONG:
        torch.testing.assert_close([tensor.detach() for tensor in results.outputs], expected)


@pytest.mark.parametrize("mode", MODES)
def test_written_argument_is_returned(mode: str) -> None:
    results = run(mode, torch.ops.aten.add_.Tensor, torch.ones(3), torch.ones(3), mutates=True)
    torch.testing.assert_close(results.arguments[0], torch.full((3,), 2.0))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.values[0] not in ("eager", "cpu", "jit")])
def test_branch_on_a_value_is_compiled_or_refused(mode: str) -> None:
    def branching(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1

    if mode in ("compile:aot_eager", "compile", "compile-dynamic"):
        torch.testing.assert_close(run(mode, branching, torch.ones(3)).outputs[0], torch.full((3,), 2.0))
        return
    with pytest.raises(RuntimeError, match="data-dependent"):
        run(mode, branching, torch.ones(3))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.values[0] in ("onnxruntime", "tvm", "xla")])
def test_arguments_are_copied_in_each_run_unless_they_are_weights(mode: str) -> None:
    left, right = torch.ones(4, 3).t(), torch.ones(2, 4).t()
    program = find_mode(mode)[0].make(Task(torch.mm, (left, right), {}, weights={1}))
    assert program.enter is not None
    assert program.leave is not None
    copies = r"tensor 1 copied in each run: 48 bytes in \d+ us; tensor 2 copied once: 32 bytes in \d+ us"
    assert re.search(copies, program.note)
    args, _ = program.enter(((left, right), {}))
    left.fill_(2)
    right.fill_(5)
    # the first argument has its new values, the second its old ones
    assert program.leave(program.function(*args)).outputs[0].unique().tolist() == [8]


def test_entering_a_compiled_function_takes_a_part_of_its_time() -> None:
    left, right = torch.ones(2000, 2000), torch.ones(2000, 2000)
    program = find_mode("compile:eager")[0].make(Task(torch.mm, (left, right), {}, argument="eager"))
    began = perf_counter_ns()
    result = program.function(left, 2 * right)
    assert program.enter_us is not None
    assert 0 < program.enter_us < (perf_counter_ns() - began) / 2e3
    assert result.unique().tolist() == [4000]


def test_jit_refuses_extension_functions() -> None:
    ext = optional("mmcv.ops.nms").ext_module
    boxes = torch.tensor([[0.0, 0.0, 4.0, 4.0], [8.0, 8.0, 12.0, 12.0]])
    with pytest.raises(Unsupported, match="extension"):
        run("jit", ext.nms, boxes, torch.tensor([0.1, 0.9]), 0.5, 0)


def test_builtin_torch_functions_are_traced() -> None:
    torch.testing.assert_close(run("jit", torch.relu, -torch.ones(3)).outputs[0], torch.zeros(3))
