import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from opgrip.replay.modes import Task, find_mode
from opgrip.replay.operators import Unsupported

jax = pytest.importorskip("jax")
# it imports only with the help that the mode gives it
pytestmark = pytest.mark.skipif(find_spec("torchax") is None, reason="torchax is not installed")


def run(function, *args, **about):
    program = find_mode("xla")[0].make(Task(function, args, {}, **about))
    given, _ = program.enter((args, {}))
    return program.leave(program.function(*given))


def attention(query, key, value):
    weights = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
    return weights @ value, weights.argmax(-1)


CASES = {
    "an operator": (torch.ops.aten.add.Tensor, (torch.randn(3, 4), torch.randn(4))),
    "a function of several operators": (attention, tuple(torch.randn(3, 2, 5, 4))),
    "a tensor that the function makes": (lambda x: x + torch.arange(3), (torch.ones(3, dtype=torch.int64),)),
    "integers of 64 bits": (torch.ops.aten.mul.Tensor, (torch.arange(4) + 2**40, torch.arange(4))),
    "a float added to integers": (torch.ops.aten.add.Scalar, (torch.arange(4), 0.5)),
    "floats of 64 bits": (torch.ops.aten.mul.Scalar, (torch.randn(4, dtype=torch.float64), 3)),
    "floats of 16 bits": (torch.ops.aten.add.Scalar, (torch.randn(4).bfloat16(), 1.5)),
    "booleans": (torch.ops.aten.logical_not.default, (torch.tensor([True, False]),)),
    "an argument as it came": (lambda x: (x, x + 1), (torch.randn(3),)),
    "no elements": (torch.ops.aten.exp.default, (torch.zeros(0, 4),)),
    "a conjugate view": (torch.ops.aten.abs.default, (torch.randn(3, dtype=torch.complex64).conj(),)),
    "an argument that asks for gradients": (torch.ops.aten.relu.default, (torch.randn(3, requires_grad=True),)),
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


def test_results_whose_shapes_hang_on_values_are_told_in_one_line():
    with pytest.raises(Unsupported, match=r"^jax cannot run it: shapes in it hang on values$"):
        run(torch.ops.aten.nonzero.default, torch.ones(3))


def test_what_was_compiled_is_kept_and_not_compiled_again(tmp_path):
    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)
    args = (torch.randn(7, 3), torch.randn(3))
    run(torch.ops.aten.sub.Tensor, *args, store=tmp_path)
    assert list(tmp_path.iterdir())
    found = len(hits)
    run(torch.ops.aten.sub.Tensor, *args, store=tmp_path)
    assert len(hits) > found


def test_another_number_of_threads_is_refused_once_it_runs():
    run(torch.relu, torch.ones(3))
    with pytest.raises(Unsupported, match="has 1 threads in this process and cannot change to 2"):
        run(torch.relu, torch.ones(3), threads=2)


def test_torch_is_as_it_was_after_torchax_is_imported(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "from opgrip.replay.modes import Task, find_mode\n"
        "def state():\n"
        "    tables = torch._decomp.global_decomposition_table\n"
        "    return (\n"
        "        torch.backends.mha.get_fastpath_enabled(),\n"
        "        torch.accelerator.current_accelerator(),\n"
        "        torch._C._get_privateuse1_backend_name(),\n"
        "        torch.get_default_device(),\n"
        "        torch.get_default_dtype(),\n"
        "        torch._C._len_torch_dispatch_stack(),\n"
        "        torch._C._len_torch_function_stack(),\n"
        "        {kind: dict(table) for kind, table in tables.items()},\n"
        "        hasattr(torch.ops.aten.prod, 'dim_Dimname'),\n"
        "    )\n"
        "before = state()\n"
        "find_mode('xla')[0].make(Task(torch.relu, (torch.ones(3),), {}))\n"
        "assert 'torchax' in sys.modules\n"
        "assert state() == before\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
