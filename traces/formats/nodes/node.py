"""A node of an execution trace: an operator, a label around others, a thread, or a kernel of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LATEST_NUMBER = 1 << 53
"""Bound of nodes' numbers."""
NONE = "<None>"
"""What stands for None among the values."""
FUNCTION_SCOPE, BACKWARD_SCOPE, USER_SCOPE = 0, 1, 7
"""What recorded a node, as torch counts it: an operator, a backward node, a label of the program."""
PROCESS = "[pytorch|profiler|execution_trace|process]"
THREAD = "[pytorch|profiler|execution_trace|thread]"
THREADS = (THREAD, "[pytorch|profiler|execution_graph|thread]")
ROOTS = (*THREADS, PROCESS, "[pytorch|profiler|execution_graph|process]")
BACKWARD_LABEL = "autograd::engine::evaluate_function: "
OPTIMIZER_LABEL = "Optimizer.step#"
OPTIMIZER_STEP = f"{OPTIMIZER_LABEL}step"
"""The label of an optimizer's step that the program has no label of its own for."""
MODULE_LABEL = "nn.Module: "


@dataclass(frozen=True, slots=True)
class Port:
    """What goes into a node, or comes out of it: four lists of equal length, which is all that is checked of them.

    Attributes
    ----------
    values : numbers, texts, lists of such; of a tensor `[tensor, storage, offset, elements, bytes of each, device]`
    shapes : of tensors; empty for all else
    types : `Tensor(float)`, `Int`, `GenericList[Int,Int]`
    strides : of tensors, as `shapes` has them; None in files before schema 1.1.1
    """

    values: list[Any]
    shapes: list[Any]
    types: list[Any]
    strides: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A node, with nothing of it checked but its own fields.

    Attributes
    ----------
    number : nodes begin in the order of their numbers
    parent : number of the node around it; its own for the process
    schema : an operator's, as torch writes it; empty for all else
    scope : what recorded it, as `USER_SCOPE`
    thread : the observer's number of it
    backend : what made a kernel of torch.compile's, `triton`; empty for all else
    record : number of the call, the same for all parts that Chakra splits an operator into; 0 where none is told
    start_us : when it began, where a profiler's times were linked to the trace
    own_us : how long it took without the nodes inside it
    ranges : the least and largest value of inputs that are tensors, by their place among these: JSON, or empty
    stream : of a kernel, the device's stream; None for what runs on the host
    """

    number: int
    name: str
    parent: int
    inputs: Port
    outputs: Port
    schema: str = ""
    scope: int = FUNCTION_SCOPE
    thread: int = 0
    backend: str = ""
    record: int = 0
    start_us: float | None = None
    own_us: float | None = None
    stream: int | None = None
    ranges: str = ""


NO_PORT = Port([], [], [])
