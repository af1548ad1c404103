"""How fast memory is copied here: what bounds the time of any function that is one kernel from below."""

from __future__ import annotations

import torch

from opgrip.errors import UserError
from opgrip.platform.devices import check_device
from opgrip.platform.measurement_cache import measure_once
from opgrip.traces.analysis.ceilings.ceilings import read_cached_ceilings
from opgrip.traces.analysis.ceilings.copying import memory
from opgrip.traces.schema.arguments import tensors
from opgrip.traces.table.trace import Trace


def bandwidth(device: str = "cpu") -> float:
    """Bytes that this machine reads and writes in a second of copying, by as many threads as torch uses.

    As `opgrip machine` measured it, or else as measured now or at an earlier time.

    Raises
    ------
    UserError : where the machine lacks the device
    """
    check_device(device)
    threads = torch.get_num_threads() if device == "cpu" else 1
    ceilings = read_cached_ceilings(device)
    if ceilings is not None:
        return ceilings.bandwidth(ceilings.levels[-1], threads) * 1e9
    return measure_once("bandwidth", device, lambda: (memory(device, [threads]).bandwidth[threads] * 1e9,))[0]


def bandwidth_of(trace: Trace) -> float:
    """The same, of the device that a trace's tensors were on: of an accelerator where it has any.

    Raises
    ------
    UserError : where the machine lacks the device
    """
    devices = {spec.device for item in trace.signatures for spec in tensors([item.args, item.kwargs, item.outputs])}
    device = min(devices - {"cpu", "meta"}, default="cpu")
    try:
        return bandwidth(device)
    except UserError as error:
        problem = f"the trace was made on {device}, whose memory cannot be measured here"
        raise UserError(problem, "say how fast it is with --bandwidth") from error
