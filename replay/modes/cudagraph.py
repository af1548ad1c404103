"""The mode `cudagraph`: the call captured as a CUDA graph once, and launched as a whole."""

from __future__ import annotations

from opgrip.replay.modes.mode import Program, Task, mode


@mode("cudagraph", devices=("cuda",), ahead=False, in_graphs=True)
def make(task: Task) -> Program:
    """The call as a graph over the memory of its arguments."""
    from opgrip.replay.modes.conversions.cuda_graphs import as_graph

    return as_graph(task)
