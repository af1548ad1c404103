"""Values on an accelerator: copied where they are when a call is met, and fitted when the copy has come to the host.

Nothing in the program's threads waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from opgrip.capture.hooks.graph_captures import GraphCaptures
from opgrip.capture.timing.accelerators import accelerators, current_stream, is_capturing, on_device
from opgrip.traces.values.model import sample

MOST_ELEMENTS = 1 << 22
"""Of a tensor that is copied whole; of a larger one, some are."""
MOST_BYTES = 256 << 20
"""That copies take of a device in all; of what comes beyond, no values are kept."""


@dataclass(slots=True)
class Waiting:
    """A copy that is on its way.

    Attributes
    ----------
    op, argument : what the tensor is
    outputs : of its call, once they are known
    """

    number: int
    op: str
    argument: str
    copy: torch.Tensor
    event: Any
    outputs: Any = None


def is_deferred(tensor: torch.Tensor) -> bool:
    """Whether to look at a tensor's values would wait for its device."""
    return tensor.device.type in accelerators()


def _mark(device: torch.device) -> Any:
    event = torch.Event(device=device)
    with on_device(device):
        event.record(current_stream(device))
    return event


class Deferred:
    """Copies in the order in which they were made."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()
        self._bytes = 0

    def add(self, number: int, op: str, argument: str, tensor: torch.Tensor) -> bool:
        """Copy a tensor's values; whether that can be."""
        if is_capturing(tensor.device.type):
            # a copy would become a part of the graph
            return False
        part = sample(tensor.detach(), MOST_ELEMENTS)
        if self._bytes + part.nbytes > MOST_BYTES:
            return False
        self._bytes += part.nbytes
        self._waiting.append(Waiting(number, op, argument, part.clone(), _mark(tensor.device)))
        return True

    def tell(self, number: int, outputs: Any) -> None:
        """Give what a call returned to a tensor that it took."""
        for item in reversed(self._waiting):
            if item.number == number:
                item.outputs = outputs
                return

    def ready(self, graphs: GraphCaptures, wait: bool) -> Iterator[tuple[int, torch.Tensor, Waiting]]:
        """Numbers and values of those that have come, each once.

        Parameters
        ----------
        graphs : the program's captures, between which devices may be asked
        wait : for all of them
        """
        while self._waiting:
            with graphs.question() as may_ask, on_device(self._waiting[0].copy.device):
                if not may_ask or not (wait or self._waiting[0].event.query()):
                    return
                item = self._waiting.popleft()
                self._bytes -= item.copy.nbytes
                # it is read in another stream than the one that it was made in, which does not wait for that
                item.event.synchronize()
                values = item.copy.cpu()
            yield item.number, values, item
