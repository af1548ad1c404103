"""Tests of modes through the command line, including faulty ones, and a stand-in for CUDA's graphs."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pandas as pd
import planted_modes
import pytest
import torch
from foreign_data import write_as
from optional import optional
from outside import with_package
from programs import refusal, run_command
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.capture import Capture
from opgrip.replay import Results
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.cases.unused_results import with_weights
from opgrip.replay.modes import Program, Task, find_mode
from opgrip.replay.modes.cudagraph import _stream_and_anchor
from opgrip.replay.results.results import Result
from opgrip.replay.run.preparation import prepare
from opgrip.replay.run.programs import run_program
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.workload import load_workload
from opgrip.replay.timing.timing_options import Effort, TimingOptions
from opgrip.traces import Trace, load
from opgrip.traces.io.foreign_files import Losses, formats
from opgrip.traces.schema.arguments import leaves

FAST = ("--iterations", "2", "--warmup", "0", "--threads", "1", "--jobs", "1")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a trace of few operators, one of which writes into its argument, and one of which is random."""
    path = tmp_path_factory.mktemp("modes") / "calls.jsonl"
    torch.manual_seed(0)
    left, right = torch.randn(16, 8), torch.randn(8, 8)
    with torch.no_grad(), Capture(path):
        torch.mm(left, right)
        left.clone().mul_(3)
        torch.sort(left.round())
        torch.bernoulli(torch.full((64, 64), 0.3))
        (left > 0).nonzero()
    return path


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a command in which a package with modes is installed."""
    store = tmp_path_factory.mktemp("store")
    return with_package(tmp_path_factory.mktemp("site"), {"opgrip.modes": "planted_modes"}) | {
        "OPGRIP_CACHE": str(store)
    }


def replayed(
    trace: Path, folder: Path, environment: dict[str, str], *options: str, status: int = 0
) -> tuple[pd.DataFrame, CompletedProcess[str]]:
    output = folder / "results.json"
    done = run_command("opreplay", trace, *FAST, *options, "-o", output, "-f", env=environment)
    assert done.returncode == status, done.stderr
    return Results.load(output).frame, done


def rows_of(rows: pd.DataFrame, mode: str) -> pd.DataFrame:
    return rows[rows["mode"] == mode].set_index("op")


def test_plugin_mode_runs_next_to_eager(trace: Path, tmp_path: Path, planted: dict[str, str]) -> None:
    rows, done = replayed(trace, tmp_path, planted, "--mode", "planted-same")
    assert set(rows["mode"]) == {"eager", "planted-same"}
    assert set(rows["status"]) == {"ok"}
    mine = rows_of(rows, "planted-same")
    assert mine["ratio"].notna().all()
    assert rows_of(rows, "eager")["ratio"].isna().all()
    assert (mine["max_abs"].dropna() == 0).all()
    assert (mine["first_ms"] > 0).all()
    assert set(mine["note"]) == {"as it is"}
    assert "compared with eager" in done.stdout
    assert "planted-same (as it is)" in done.stdout


@pytest.mark.slow
def test_compiled_program_is_loaded_in_the_next_run(trace: Path, tmp_path: Path, planted: dict[str, str]) -> None:
    environment = planted | {"OPGRIP_CACHE": str(tmp_path / "cache")}
    rows, _ = replayed(trace, tmp_path, environment, "--mode", "planted-keeps")
    assert set(rows_of(rows, "planted-keeps")["note"]) == {"made"}
    rows, _ = replayed(trace, tmp_path, environment, "--mode", "planted-keeps")
    assert set(rows_of(rows, "planted-keeps")["note"]) == {"loaded"}
    assert not list((tmp_path / "cache").glob("*/.*"))


def test_wrong_results_are_detected(trace: Path, tmp_path: Path, planted: dict[str, str]) -> None:
    modes = ("--mode", ",".join(planted_modes.WRONG))
    rows, done = replayed(trace, tmp_path, planted, *modes, "--op", "aten.mm*", "--op", "aten.nonzero*")
    assert set(rows_of(rows, "eager")["status"]) == {"ok"}
    for mode in planted_modes.WRONG:
        wrong = rows_of(rows, mode)
        assert set(wrong["status"]) == {"wrong"}, mode
        assert wrong["error"].str.len().gt(10).all()
        assert wrong["median_us"].isna().all()
        assert f"{mode} wrong: " in done.stdout


@pytest.mark.slow
def test_failing_mode_fails_only_in_its_row(trace: Path, tmp_path: Path, planted: dict[str, str]) -> None:
    bad = {
        "planted-refuses": ("unsupported", "ValueError: line one line two"),
        "planted-hangs": ("timeout", "it took longer than 3 s"),
        "planted-crashes": ("failed", "segmentation fault"),
        "planted-crashes-later": ("failed", "segmentation fault"),
        "planted-raises": ("failed", "RuntimeError: it does not run"),
    }
    options = ("--mode", ",".join((*bad, "planted-same")), "--timeout", "3", "--iterations", "6")
    environment = planted | {"OPGRIP_CACHE": str(tmp_path / "cache")}
    rows, done = replayed(trace, tmp_path, environment, *options, "--op", "aten.mm*", status=1)
    assert re.findall("nothing ran with --mode ([^ ]+):", done.stderr) == list(bad)
    assert not list((tmp_path / "cache").glob("*/.*"))
    for mode, (status, message) in bad.items():
        found = rows_of(rows, mode)
        assert found["status"].tolist() == [status], mode
        assert found["error"].str.contains(message, regex=False).all()
    assert rows_of(rows, "eager")["status"].tolist() == ["ok"]
    assert rows_of(rows, "planted-same")["status"].tolist() == ["ok"]


@pytest.mark.slow
def test_row_that_ran_out_of_memory_is_compiled_again_separately(
    trace: Path, tmp_path: Path, planted: dict[str, str]
) -> None:
    (tmp_path / "cache").mkdir()
    environment = planted | {"OPGRIP_CACHE": str(tmp_path / "cache")}
    rows, _ = replayed(trace, tmp_path, environment, "--mode", "planted-crowded", "--op", "aten.mm*")
    assert rows_of(rows, "planted-crowded")["status"].tolist() == ["ok"]


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("planted-needy", "needs no_such_package.part, which is not installed: install it"),
        ("no-such-mode", "unknown mode 'no-such-mode': choose from "),
        ("my_kernels.py", "; docs/modes.md shows how to add one"),
        ("compile:", "'compile:' is not a mode: write compile:BACKEND"),
        ("compile:nope", "compile has no backend 'nope': choose from "),
        ("planted-searches:untuned --tune 2", "these modes cannot search for better programs: "),
        ("planted-searches --tune 2 --tuner skill", "unknown tuner 'skill': choose from luck"),
    ],
)
def test_unavailable_mode_is_reported_in_one_line(
    trace: Path, planted: dict[str, str], mode: str, message: str
) -> None:
    error = refusal("opreplay", trace, "--mode", *mode.split(), env=planted, in_one_line=True)
    assert error.startswith("opreplay: error: ")
    assert message in error


def test_one_run_compares_tuned_and_untuned_programs(trace: Path, tmp_path: Path, planted: dict[str, str]) -> None:
    modes = "planted-searches:untuned,planted-searches"
    options = ("--mode", modes, "--tune", "2", "--reference", "planted-searches:untuned", "--op", "aten.mm*")
    rows, _ = replayed(trace, tmp_path, planted, *options)
    assert rows[["mode", "tune"]].fillna("").values.tolist() == [
        ["planted-searches:untuned", ""],
        ["planted-searches", "2"],
    ]
    assert [note.split(",")[0] for note in rows["note"]] == ["0 trials", "2 trials"]


def test_any_mode_can_be_the_reference(trace: Path, tmp_path: Path, planted: dict[str, str]) -> None:
    options = ("--mode", "planted-same,planted-scaled", "--reference", "planted-same", "--op", "aten.mm*")
    rows, done = replayed(trace, tmp_path, planted, *options)
    assert rows["mode"].tolist() == ["planted-same", "planted-scaled"]
    assert rows["status"].tolist() == ["ok", "wrong"]
    assert "compared with planted-same" in done.stdout


def test_tolerances_can_be_set(trace: Path, tmp_path: Path, planted: dict[str, str]) -> None:
    options = ("--mode", "planted-scaled", "--op", "aten.mm*", "--rtol", "0.01")
    rows, _ = replayed(trace, tmp_path, planted, *options)
    assert rows["status"].tolist() == ["ok", "ok"]


def test_gradients_are_compared(tmp_path: Path, planted: dict[str, str]) -> None:
    weight = torch.randn(8, 4, requires_grad=True)
    path = tmp_path / "forward.jsonl"
    with Capture(path):
        (torch.randn(6, 8) @ weight).tanh()
    options = ("--backward", "--mode", "jit,compile:aot_eager,onnxruntime,planted-scaled")
    optional("onnxruntime")
    rows, _ = replayed(path, tmp_path, planted, *options, "--op", "aten.mm*", "--op", "aten.tanh*")
    backward = rows[rows["direction"] == "backward"]
    assert len(backward) == 10
    assert set(backward[backward["mode"] != "planted-scaled"]["status"]) == {"ok"}
    # scaled results have scaled gradients
    assert set(rows_of(backward, "planted-scaled")["status"]) <= {"wrong", "unsupported"}


def test_weights_are_tensors_that_no_call_makes_or_writes(tmp_path: Path) -> None:
    image, weight, state = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6, 5)
    with torch.no_grad(), Capture(tmp_path / "calls.jsonl"):
        for _ in range(2):
            hidden = torch.mm(image, weight.t())
            torch.mm(hidden, state)
            state.add_(1)
    trace = load(tmp_path / "calls.jsonl")
    cases = sorted(with_weights(make_cases(trace), trace), key=lambda case: case.number)
    names = ["aten.t.default", "aten.mm.default", "aten.mm.default", "aten.add_.Tensor"]
    assert [(case.op, set(case.weights)) for case in cases] == [*zip(names, [{0}, {0, 1}, set(), set()], strict=True)]


RELU = "aten.relu.default"


def backward_rows(target: str) -> dict[str, Result]:
    plan = RunRequest(timing=TimingOptions(backward=True), effort=Effort(warmup=0))
    loaded = load_workload(replace(plan, trace=str(target)))
    rows = [row for case in loaded.cases for _, row, _ in prepare(case, loaded)]
    assert all(row.status == "ok" for row in rows if row.direction == "forward"), rows
    return {row.op: row for row in rows if row.direction == "backward"}


def captured(folder: Path) -> Trace:
    weight = torch.randn(8, 8)
    with Capture(folder / "own.jsonl", force=True), torch.no_grad():
        (torch.randn(4, 8) @ weight).relu().argmax(-1)
        torch.ones(2, dtype=torch.complex64).exp()
    return load(folder / "own.jsonl")


def written(name: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        write_as(name, captured(folder), folder / "file")
        return str(folder / "file")

    return write


def flashinfer(folder: Path) -> str:
    format_ = formats.get("flashinfer")
    assert format_ is not None
    assert format_.write_folder is not None
    (folder / "dataset").mkdir()
    format_.write_folder(captured(folder), folder / "dataset", Losses())
    return str(folder / "dataset")


def table(folder: Path) -> str:
    (folder / "relu.json").write_text(json.dumps({"input_size": [[2, 3]]}), encoding="utf-8")
    return str(folder / "relu.json")


def profile(folder: Path) -> str:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler, torch.no_grad():
        (torch.randn(4, 8) @ torch.randn(8, 8)).relu()
    profiler.export_chrome_trace(str(folder / "profile.json"))
    return str(folder / "profile.json")


def onnx(folder: Path) -> str:
    onnx = optional("onnx")
    helper, proto = optional("onnx.helper"), onnx.TensorProto
    values = [helper.make_tensor_value_info(name, proto.FLOAT, [2, 3]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", values[:1], values[1:])
    onnx.save(helper.make_model(graph), folder / "relu.onnx")
    return str(folder / "relu.onnx")


@pytest.mark.parametrize(
    "make",
    [written("tritonbench"), written("chakra"), table, profile, onnx],
    ids=["tritonbench", "chakra", "dlop", "chrome", "onnx"],
)
def test_files_without_requires_grad_have_backward_rows(make: Callable[[Path], str], tmp_path: Path) -> None:
    assert backward_rows(make(tmp_path))[RELU].status == "ok"


def test_captures_record_which_tensors_require_gradients(tmp_path: Path) -> None:
    captured(tmp_path)
    assert backward_rows(str(tmp_path / "own.jsonl"))[RELU].error == "no argument required a gradient"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("aten.argmax.default|((T([2, 3], f32),), {})", "not differentiable: its results have no gradient"),
        ("aten.add.Tensor|((T([2], i64), T([2], i64)), {})", "not differentiable: it has no floating-point tensor"),
        ("aten.relu_.default|((T([2], f32),), {})", "writes into its arguments"),
        ("aten.view.default|((T([2, 3], f32), [6]), {})", None),
    ],
)
def test_operator_without_gradients_reports_the_reason(call: str, reason: str | None, tmp_path: Path) -> None:
    op, _, arguments = call.partition("|")
    (tmp_path / "inputs.txt").write_text(f"Operator: {op}\ncnt: 1, {arguments}\n", encoding="utf-8")
    row = backward_rows(str(tmp_path / "inputs.txt"))[op]
    assert row.status == ("ok" if reason is None else "unsupported")
    assert reason is None or reason in str(row.error)


class Graph(TorchDispatchMode):
    """Operators in capture order, each with the tensors that it read and created."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        # operators must have no effect during a capture, so undo it
        for storage, before in self._before.values():
            storage.copy_(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in leaves([args, kwargs or {}]):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        results = func(*args, **(kwargs or {}))
        made = [leaf for leaf in leaves([results]) if isinstance(leaf, Tensor)]
        self.operators.append((func, args, kwargs or {}, made))
        return results

    def replay(self) -> None:
        for func, args, kwargs, made in self.operators:
            again = [leaf for leaf in leaves([func(*args, **kwargs)]) if isinstance(leaf, Tensor)]
            for memory, tensor in zip(made, again, strict=True):
                if memory.data_ptr() != tensor.data_ptr():
                    memory.copy_(tensor)

    def pool(self) -> tuple[int, int]:
        return 0, 1


class Stream:
    def wait_stream(self, stream: object) -> None:
        pass


class Cuda:
    """Stand-in that records captures and their pools, and raises errors for operations that wait for the device."""

    def __init__(self) -> None:
        self.captures: list[Graph] = []
        self.pools: list[object] = []
        self.raises = 0

    def graph(self, graph: Graph, pool: object = None, stream: object = None) -> Graph:
        self.captures.append(graph)
        self.pools.append(pool)
        return graph

    def set_sync_debug_mode(self, debug_mode: int | str) -> None:
        self.raises = 2 if debug_mode == "error" else 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    stand_in = Cuda()
    for name, value in {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "graph": stand_in.graph,
        "device": nullcontext,
        "stream": nullcontext,
        "current_stream": lambda device: Stream(),
        "set_sync_debug_mode": stand_in.set_sync_debug_mode,
        "get_sync_debug_mode": lambda: stand_in.raises,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    _stream_and_anchor.cache_clear()
    yield stand_in
    _stream_and_anchor.cache_clear()


def in_a_graph(function: Callable[..., Any], *args: Any, **about: Any) -> Program:
    return find_mode("cudagraph")[0].make(Task(function, args, {}, **about))


def test_graph_arguments_keep_strides_expansion_and_sharing(cuda: Cuda) -> None:
    seen: list[tuple[tuple[int, ...], ...]] = []

    def watched(*tensors: Tensor) -> Tensor:
        seen.append(tuple(tensor.stride() for tensor in tensors))
        return tensors[0] + tensors[1]

    row = torch.arange(4.0)
    args = (row.expand(3, 4), torch.randn(4, 3).t())
    program = in_a_graph(watched, *args)
    _, results = run_program(program, (args, {}), mutates=False)
    assert set(seen) == {((0, 1), (1, 3))}
    torch.testing.assert_close(results.outputs[0], args[0] + args[1])


def test_call_that_writes_into_shared_arguments_is_correct(cuda: Cuda) -> None:
    def shift(whole: Tensor, part: Tensor) -> Tensor:
        part.add_(1)
        return whole.mul_(2)

    def arguments() -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        whole = torch.arange(6.0)
        return (whole, whole[2:4]), {}

    program = in_a_graph(shift, *arguments()[0], mutates=True)
    for _ in range(2):
        own = arguments()
        _, results = run_program(program, own, mutates=True)
        torch.testing.assert_close(own[0][0], torch.tensor([0.0, 2, 6, 8, 8, 10]))
        torch.testing.assert_close(results.arguments[1], torch.tensor([6.0, 8]))


def test_calls_of_another_shape_have_a_separate_graph(cuda: Cuda) -> None:
    narrow, wide = torch.randn(2, 3), torch.randn(5, 3)
    program = in_a_graph(torch.ops.aten.exp.default, narrow, others=[((wide,), {})])
    count = len(cuda.captures)
    for tensor in (wide, narrow):
        torch.testing.assert_close(run_program(program, ((tensor,), {}), False)[1].outputs[0], tensor.exp())
    assert len(cuda.captures) == count


def test_synchronizing_call_is_refused_before_the_graph_capture(cuda: Cuda) -> None:
    def waiting(tensor: Tensor) -> Tensor:
        if cuda.raises:
            raise RuntimeError("called a synchronizing CUDA operation")
        return tensor.nonzero()

    with pytest.raises(RuntimeError, match="synchronizing"):
        in_a_graph(waiting, torch.ones(3))
    assert not cuda.raises
    assert len(cuda.captures) <= 1


def test_row_explains_that_graph_modes_need_a_gpu(tiny_trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    modes = ("--mode", "reduce-overhead,cudagraph", "--top", "1", "--iterations", "2", "--jobs", "1")
    done = run_command("opreplay", tiny_trace, *modes, "-o", output)
    assert done.returncode == 1, done.stderr
    assert "nothing ran with --mode reduce-overhead: " in done.stderr
    rows = Results.load(output).frame.set_index("mode")
    assert rows.loc["reduce-overhead", "status"] == rows.loc["cudagraph", "status"] == "unsupported"
    message = "it needs CUDA graphs, which cpu does not support: use compile"
    assert rows.loc["reduce-overhead", "error"] == message
    assert rows.loc["cudagraph", "error"] == "cudagraph runs on cuda, not on cpu"


@pytest.mark.slow
def test_graph_mode_is_refused_with_several_streams(tiny_trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    several = ("--mode", "reduce-overhead", "--streams", "2", "--top", "1", "--iterations", "2", "--jobs", "1")
    done = run_command("opreplay", tiny_trace, *several, "-o", output)
    assert done.returncode == 1, done.stderr
    assert "nothing ran with --mode reduce-overhead: " in done.stderr
    row = Results.load(output).frame.set_index("mode").loc["reduce-overhead"]
    assert row["status"] == "unsupported"
    assert row["error"] == "reduce-overhead replays CUDA graphs in one thread: remove --streams"
