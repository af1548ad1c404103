"""The mode `cudagraph`: runs a call as a CUDA graph, so that one launch starts all of its kernels."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from opgrip.replay.modes import Program, RunOutputs, Task, mode

if TYPE_CHECKING:
    from torch import Tensor

    from opgrip.replay.modes.conversions.runtimes import TensorCall
    from opgrip.replay.operators.memory import Arguments, CallMemory


WARMUP = 3  # number of runs before the capture, in which libraries initialize


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Any
    call: TensorCall
    tensors: Sequence[Tensor]
    results: Sequence[Tensor]
    memory: CallMemory


@mode("cudagraph", devices=("cuda",), ahead=False, in_graphs=True)
def as_graph(task: Task) -> Program:
    """Return a program that runs the call as CUDA graphs, one for each set of argument tensors."""
    examples: list[Arguments] = [(task.args, task.kwargs), *task.others]
    captures = []
    for example in examples:
        _warm_up(task, example)
        captures.append(_capture(task, example))
    memory = captures[0].memory
    # these tensors are not valid examples after a call has written into them
    graphs = {} if task.mutates else {_place_of(captured.tensors): captured for captured in captures}

    def enter(arguments: Arguments) -> Arguments:
        place = _place_of(_call_of(task, arguments).enter(arguments)[0])
        if place not in graphs:
            graphs[place] = _capture(task, arguments)
        return (graphs[place],), {}

    def leave(captured: _Captured) -> RunOutputs:
        return captured.call.leave(captured.results)

    return Program(_run, enter, leave, in_place=True, memory=memory)


def _run(captured: _Captured) -> _Captured:
    captured.graph.replay()
    return captured


def _call_of(task: Task, arguments: Arguments) -> TensorCall:
    from opgrip.replay.modes.conversions.runtimes import TensorCall

    args, kwargs = arguments
    return TensorCall(replace(task, args=args, kwargs=kwargs), in_place=True)


def _place_of(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    return tuple((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)


def _warm_up(task: Task, example: Arguments) -> None:
    import torch

    call = _call_of(task, example)
    tensors, _ = call.enter(example)
    stream, checks = _stream_and_anchor(task.device)[0], torch.cuda.get_sync_debug_mode()
    stream.wait_stream(torch.cuda.current_stream(task.device))
    try:
        with torch.cuda.stream(stream):
            for run in range(WARMUP):
                if run == WARMUP - 1:
                    # a call that waits for the device would make this capture and later ones fail
                    torch.cuda.set_sync_debug_mode("error")
                call(*tensors)
    finally:
        torch.cuda.set_sync_debug_mode(checks)
    torch.cuda.current_stream(task.device).wait_stream(stream)


def _capture(task: Task, arguments: Arguments) -> _Captured:
    import torch

    from opgrip.replay.operators.memory import with_memory

    call = _call_of(task, arguments)
    tensors, _ = call.enter(arguments)
    stream, anchor = _stream_and_anchor(task.device)
    graph = torch.cuda.CUDAGraph()

    def record() -> Sequence[Tensor]:
        with torch.cuda.graph(graph, pool=anchor.pool(), stream=stream):
            results: Sequence[Tensor] = call(*tensors)
        return results

    # a failed capture leaves its stream current
    with torch.cuda.device(task.device), torch.cuda.stream(torch.cuda.current_stream(task.device)):
        results, memory = with_memory(record, task.device)
    return _Captured(graph, call, tensors, results, memory)


# graphs of one memory pool use each other's intermediate memory, so they must not run concurrently
@functools.cache
def _stream_and_anchor(device: str) -> tuple[Any, Any]:
    import torch

    with torch.cuda.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            pass
    return stream, graph
