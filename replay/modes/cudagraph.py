"""The mode `cudagraph`: the call captured as a CUDA graph, whose replay launches all of its kernels at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opgrip.replay.modes.mode import Program, Results, Task, mode

if TYPE_CHECKING:
    from opgrip.replay.operators.calling import Arguments

WARMUP = 3
"""Runs before the capture, in which libraries set themselves up."""


@mode("cudagraph", devices=("cuda",), ahead=False)
def as_graph(task: Task) -> Program:
    """The call as a graph over memory of its own, which the arguments are copied into before each run."""
    import torch

    from opgrip.replay.modes.conversions.graphs import TensorCall

    call = TensorCall(task, in_place=True)
    tensors, _ = call.enter((task.args, task.kwargs))
    own = [tensor.clone() for tensor in tensors]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            call(*own)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(*own)

    def enter(arguments: Arguments) -> Arguments:
        for memory, tensor in zip(own, call.enter(arguments)[0], strict=True):
            memory.copy_(tensor)
        return (), {}

    def leave(_: Any) -> Results:
        return call.leave(results)

    return Program(graph.replay, enter, leave, enters_each_run=True)
