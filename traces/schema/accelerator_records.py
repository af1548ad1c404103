"""Types of the records about an accelerator: device times, kernels, graphs, and waits between streams."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated

from opgrip.traces.schema.json_values import Count, Int64, Name
from opgrip.traces.schema.privacy import Public, hashed

_LAUNCH = re.compile(r"torch\.\w{1,32}:\w{0,32}Graph\.replay")


def is_graph_launch(op: str) -> bool:
    """Return True for the operator name of launches of a CUDA or HIP graph, such as `torch.cuda:CUDAGraph.replay`."""
    return _LAUNCH.fullmatch(op) is not None


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Record of device times that became known only after the calls were written.

    thread : number of the thread that made the calls
    first : index of the first of these calls among all calls of the thread, in the order of the trace
    device_ns : time for which the call `first` and each following one kept an accelerator busy, -1 for a call that ran
        only on the host
    """

    thread: Public[Int64]
    first: Public[Count]
    device_ns: Public[list[Int64]]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Record of the kernels, copies and fills that the calls of a signature ran on an accelerator.

    A signature can have several such records, which add up.

    signature : number of the signature
    names : names reported by the accelerator's driver
    launches, device_ns : number of launches and total time of each
    """

    signature: Public[Int64]
    names: Annotated[list[Name], hashed("kernel")]
    launches: Public[list[Count]]
    device_ns: Public[list[Count]]


@dataclass(frozen=True, slots=True)
class Wait:
    """Record that one stream of an accelerator waits for work of another stream.

    at_ns : time at which the wait began, since the start of the capture
    device, stream : device and torch's number of the stream that waits
    on_device, on_stream : device and number of the stream whose work it waits for
    until_ns : the stream waits for the work that was submitted to the other stream before this time
    """

    at_ns: Public[Int64]
    device: Public[Name]
    stream: Public[Int64]
    on_device: Public[Name]
    on_stream: Public[Int64]
    until_ns: Public[Int64]


@dataclass(frozen=True, slots=True)
class Graph:
    """Record of the calls that each launch of a CUDA or HIP graph runs again; they are known from the graph's capture.

    Each launch is a call, in the blocks of calls, of a signature that only this graph has.

    signature : number of the signature of the graph's launches
    calls, scope : numbers of the signature and scope of each call in the graph, in start order
    tensors : number of tensors in the arguments and results, one per call
    storages : storages of these tensors, call after call, with the same numbers as in `Calls`
    captured : False if the graph was captured before the recording began, so that its calls are not known
    """

    signature: Public[Count]
    calls: Public[list[Count]] = field(default_factory=list)
    scope: Public[list[Count]] = field(default_factory=list)
    tensors: Public[list[Count]] = field(default_factory=list)
    storages: Public[list[Int64]] = field(default_factory=list)
    captured: Public[bool] = True


@dataclass(frozen=True, slots=True)
class GraphTimes:
    """Record of the time of the kernels of each call in a graph, summed over launches. Several records add up.

    signature : number of the signature of the graph's launches
    device_ns : time of each call, in the order of the graph
    """

    signature: Public[Count]
    device_ns: Public[list[Count]]
