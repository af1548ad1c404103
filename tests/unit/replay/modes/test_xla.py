"""Behaviour specific to XLA and to TensorFlow, which runs it."""

from pathlib import Path

import pytest
import torch
from optional import needs_mode, optional
from programs import run_python
from runtime_calls import run, run_script

from opgrip.replay.operators.lookup import Unsupported

jax = optional("jax")
pytestmark = needs_mode("xla")


def test_data_dependent_shapes_are_refused_in_one_line() -> None:
    with pytest.raises(Unsupported, match=r"^jax cannot run it: shapes in it depend on values$"):
        run("xla", torch.ops.aten.nonzero.default, torch.ones(3))


def test_compiled_program_is_cached_and_reused(tmp_path: Path) -> None:
    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)
    args = (torch.randn(7, 3), torch.randn(3))
    run("xla", torch.ops.aten.sub.Tensor, *args, store=tmp_path)
    assert list(tmp_path.iterdir())
    found = len(hits)
    run("xla", torch.ops.aten.sub.Tensor, *args, store=tmp_path)
    assert len(hits) > found


def test_changing_the_number_of_threads_is_refused() -> None:
    run("xla", torch.relu, torch.ones(3))
    with pytest.raises(Unsupported, match="runs with 1 threads in this process and cannot change to 2"):
        run("xla", torch.relu, torch.ones(3), threads=2)


def test_results_have_the_dtypes_of_torch() -> None:
    made = run("xla", lambda x: (torch.zeros(2) + x, torch.full((2,), 0.5), x.new_zeros(2)), torch.ones(1))
    assert [tensor.dtype for tensor in made.outputs] == [torch.float32] * 3
    results = run("xla", lambda x: (x, x.topk(2).indices, torch.arange(2)), torch.ones(3))
    assert [tensor.dtype for tensor in results.outputs] == [torch.float32, torch.int64, torch.int64]


def test_importing_torchax_does_not_change_torch(tmp_path: Path) -> None:
    run_script(
        tmp_path,
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
        "assert state() == before\n",
    )


@pytest.mark.slow
@needs_mode("tensorflow")
def test_tensorflow_returns_results_of_eager_or_a_reason(tmp_path: Path) -> None:
    run_script(
        tmp_path,
        """
import torch
from opgrip.replay.modes import Task, find_mode
from opgrip.replay.operators.lookup import Unsupported

def run(function, *args, **about):
    program = find_mode("tensorflow")[0].make(Task(function, args, {}, **about))
    given, _ = program.enter((args, {}))
    return program.leave(program.function(*given))

x, n = torch.randn(3, 4), torch.arange(4) + 2**40
torch.testing.assert_close(run(lambda a: (a.t() @ a).softmax(-1), x).outputs[0], (x.t() @ x).softmax(-1))
torch.testing.assert_close(run(lambda a: (a * 2, a > 2), n).outputs, [n * 2, n > 2])
torch.testing.assert_close(run(torch.ops.aten.add_.Tensor, x, x.clone(), mutates=True).arguments[0], 2 * x)
refused = (torch.nonzero, 1, "shapes in it depend on values"), (torch.relu, 2, "cannot change to 2")
for function, threads, told in refused:
    try:
        run(function, x, threads=threads)
    except Unsupported as error:
        assert told in str(error), error
    else:
        raise AssertionError(told)
""",
    )


ON_A_GPU = """
import os, torch
from opgrip.replay.modes import Task
from opgrip.replay.modes.conversions.runtimes import start
from opgrip.replay.operators.lookup import Unsupported

{first}
try:
    start(Task(torch.relu, (), {{}}, device="{device}"))
except Unsupported as error:
    print(error)
import jax
print(os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"], jax.config.jax_platforms)
assert ({{device.platform for device in jax.devices()}} == {{"cpu"}}) if "{device}" == "cpu" else True
"""


@pytest.mark.parametrize("first", ["", "import jax"])
def test_jax_starts_only_on_the_cpu_for_a_cpu_replay(first: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ON_A_GPU.format(first=first, device="cpu"))
    done = run_python(script, status=0)
    assert done.stdout.splitlines() == ["false cpu"]
