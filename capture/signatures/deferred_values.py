"""Copies of tensors on an accelerator, to which value models are fitted later, so that the program never waits for the
device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opgrip.capture.program.accelerators import (
    GraphCaptures,
    accelerators,
    in_stream,
    is_capturing,
    new_stream,
    on_device,
    record_on,
)
from opgrip.capture.torch_compat.torch_private import without_functions, without_modes
from opgrip.traces.values.model import sample

# maximum number of elements of a tensor that is copied completely; larger tensors are sampled. For each quarter of
# `MOST_BYTES` in use, samples become four times smaller.
MOST_ELEMENTS = 1 << 18
# maximum number of bytes of all copies on devices, and of copies on the host without a fitted value model; if there is
# no space for a tensor, its values are read at a later call
MOST_BYTES = 256 << 20
# maximum number of bytes, and of copies, that are transferred to the host together
TRANSFER_BYTES, TRANSFER_COPIES = 16 << 20, 256
NO_SPACE = "no space for a copy of its values on the device"
NO_COPIES_IN_GRAPHS = "called only while a graph was captured"

EMPTY = torch.empty(0)


@dataclass(slots=True)
class Waiting:
    """A copy of a device tensor whose values are not on the host yet.

    number : number of the tensor's value model
    op, argument : operator that takes the tensor, and name of the argument
    copy : the copy on the device; empty once its values have arrived
    event : event recorded in the copy's stream
    outputs : results of the call that takes the tensor, once known
    """

    number: int
    op: str
    argument: str
    copy: torch.Tensor
    event: Any
    outputs: Any = None


def is_deferred(tensor: torch.Tensor) -> bool:
    """Return True if reading a tensor's values would wait for its device."""
    return tensor.device.type in accelerators()


class Deferred:
    """Copies of device tensors, in the order in which they were made, until their values are on the host.

    A copy is made in the program's stream, and transferred to the host in another stream, so that the program's kernels
    do not wait for the transfer.
    """

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()
        self._arrived: deque[tuple[torch.Tensor, Waiting]] = deque()
        self._bytes = self._host_bytes = 0
        self._streams: dict[torch.device, Any] = {}

    def add(self, number: int, op: str, argument: str, tensor: torch.Tensor) -> str | None:
        """Copy a tensor on its device; return None, or the reason if this is not possible now.

        number : number of the tensor's value model
        """
        if is_capturing(tensor.device.type):
            # a copy would become part of the graph
            return NO_COPIES_IN_GRAPHS
        quarters = 4 * self._bytes // MOST_BYTES
        part = sample(tensor.detach(), MOST_ELEMENTS >> 2 * quarters)
        if self._bytes + part.nbytes > MOST_BYTES:
            return NO_SPACE
        self._bytes += part.nbytes
        # otherwise the stride of a single element is kept, with which it cannot be seen as bytes
        copy = part.clone(memory_format=torch.contiguous_format)
        self._waiting.append(Waiting(number, op, argument, copy, record_on(tensor.device)))
        return None

    def set_outputs(self, number: int, outputs: Any) -> None:
        """Add a call's results, nested `TensorSpec`, to the copy of that input whose value model has this number."""
        for item in reversed(self._waiting):
            if item.number == number:
                item.outputs = outputs
                return

    def ready(self, graphs: GraphCaptures, wait: bool) -> Iterator[tuple[torch.Tensor, Waiting]]:
        """Remove the copies whose values have arrived on the host, and yield the values and the description of each.

        graphs : the program's graph captures, during which devices must not be queried
        wait : True to wait for all copies
        """
        while True:
            # first empty the devices' memory
            while self._host_bytes < MOST_BYTES and self._transfer(graphs, wait):
                pass
            if not self._arrived:
                return
            values, item = self._arrived.popleft()
            self._host_bytes -= values.nbytes
            yield values, item

    def forget(self) -> None:
        self._waiting.clear()
        self._arrived.clear()
        self._bytes = self._host_bytes = 0

    def _transfer(self, graphs: GraphCaptures, wait: bool) -> bool:
        if not self._waiting:
            return False
        device = self._waiting[0].copy.device
        with graphs.question() as may_ask, on_device(device):
            batch = self._take(device, wait) if may_ask else []
            if not batch:
                return False
            arrived = self._to_host(device, batch)
        for item in batch:
            item.copy = EMPTY
        self._host_bytes += sum(values.nbytes for values in arrived)
        self._arrived.extend(zip(arrived, batch, strict=True))
        return True

    def _take(self, device: torch.device, wait: bool) -> list[Waiting]:
        batch: list[Waiting] = []
        size = 0
        while self._waiting and len(batch) < TRANSFER_COPIES:
            item = self._waiting[0]
            size += item.copy.nbytes
            if item.copy.device != device or (batch and size > TRANSFER_BYTES) or not (wait or item.event.query()):
                break
            batch.append(self._waiting.popleft())
            self._bytes -= item.copy.nbytes
        return batch

    def _to_host(self, device: torch.device, batch: Sequence[Waiting]) -> list[torch.Tensor]:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = new_stream(device)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place, item in enumerate(batch):
            by_dtype.setdefault(item.copy.dtype, []).append(place)
        values: dict[int, torch.Tensor] = {}
        with without_modes(), without_functions(), in_stream(stream), torch.no_grad():
            for item in batch:
                item.event.wait(stream)
            # together, because a transfer costs as much as many small copies
            for dtype, places in by_dtype.items():
                copies = [batch[place].copy.resolve_conj().resolve_neg() for place in places]
                flat = torch.cat([copy.reshape(-1).view(torch.uint8) for copy in copies]).cpu()
                sizes = [copy.nbytes for copy in copies]
                for place, copy, part in zip(places, copies, flat.split(sizes), strict=True):
                    values[place] = part.view(dtype).view(copy.shape)
        # the transfers have ended, so the memory of the copies may be used again in any stream
        return [values[place] for place in range(len(batch))]
