"""CUDA graph modes without a GPU: a stand-in for CUDA's graphs, and their combination with options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import refusal, run_command
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.replay import Results
from opgrip.replay.modes import Program, Task, find_mode
from opgrip.replay.modes.cudagraph import _stream_and_anchor
from opgrip.replay.run.programs import run_program
from opgrip.traces.schema.arguments import leaves


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


def captured(function: Callable[..., Any], *args: Any, **about: Any) -> Program:
    return find_mode("cudagraph")[0].make(Task(function, args, {}, **about))


def test_graph_arguments_keep_strides_expansion_and_sharing(cuda: Cuda) -> None:
    seen: list[tuple[tuple[int, ...], ...]] = []

    def watched(*tensors: Tensor) -> Tensor:
        seen.append(tuple(tensor.stride() for tensor in tensors))
        return tensors[0] + tensors[1]

    row = torch.arange(4.0)
    args = (row.expand(3, 4), torch.randn(4, 3).t())
    program = captured(watched, *args)
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

    program = captured(shift, *arguments()[0], mutates=True)
    for _ in range(2):
        own = arguments()
        _, results = run_program(program, own, mutates=True)
        torch.testing.assert_close(own[0][0], torch.tensor([0.0, 2, 6, 8, 8, 10]))
        torch.testing.assert_close(results.arguments[1], torch.tensor([6.0, 8]))


def test_calls_of_another_shape_have_a_separate_graph(cuda: Cuda) -> None:
    narrow, wide = torch.randn(2, 3), torch.randn(5, 3)
    program = captured(torch.ops.aten.exp.default, narrow, others=[((wide,), {})])
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
        captured(waiting, torch.ones(3))
    assert not cuda.raises
    assert len(cuda.captures) <= 1


GRAPH = ("--exec-mode", "graph")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*GRAPH, "--mode", "cudagraph"), "cannot capture cudagraph, which runs CUDA graphs itself"),
        (
            (*GRAPH, "--mode", "jit,reduce-overhead"),
            "cannot capture reduce-overhead, which runs CUDA graphs itself",
        ),
        ((*GRAPH, "--mode", "compile:cudagraphs"), "cannot capture compile:cudagraphs, which runs CUDA graphs itself"),
        ((*GRAPH, "--reference", "cudagraph"), "cannot capture cudagraph, which runs CUDA graphs itself"),
        ((*GRAPH, "--backward"), "cannot capture a backward pass, which runs on the stream of its forward pass"),
    ],
)
def test_graph_inside_a_graph_is_refused_in_one_line(tiny_trace: Path, options: tuple[str, ...], message: str) -> None:
    error = refusal("opreplay", tiny_trace, *options, in_one_line=True)
    assert error.startswith("opreplay: error: --exec-mode graph ")
    assert message in error
    assert error.endswith(": time it with --exec-mode events\n")


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
