"""Values on an accelerator: copied where they are when a call is met, and fitted when the copy has come to the host.

Nothing in the program's threads waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from opgrip.traces.values.model import sample

MOST_ELEMENTS = 1 << 22
"""Of a tensor that is copied whole; of a larger one, some are."""
MOST_WAITING = 1 << 28
"""Elements that wait in all; of what comes beyond, no values are kept."""


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
    return tensor.is_cuda


def _mark() -> Any:
    event = torch.cuda.Event()
    event.record()
    return event


class Deferred:
    """Copies in the order in which they were made."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()
        self._elements = 0

    def add(self, number: int, op: str, argument: str, tensor: torch.Tensor) -> bool:
        """Copy a tensor's values; whether that can be."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            # a copy would become a part of the graph
            return False
        part = sample(tensor.detach(), MOST_ELEMENTS)
        if self._elements + part.numel() > MOST_WAITING:
            return False
        self._elements += part.numel()
        self._waiting.append(Waiting(number, op, argument, part.clone(), _mark()))
        return True

    def tell(self, number: int, outputs: Any) -> None:
        """Give what a call returned to a tensor that it took."""
        for item in reversed(self._waiting):
            if item.number == number:
                item.outputs = outputs
                return

    def ready(self, wait: bool) -> Iterator[tuple[int, torch.Tensor, Waiting]]:
        """Numbers and values of those that have come, each once.

        Parameters
        ----------
        wait : for all of them
        """
        while self._waiting and (wait or self._waiting[0].event.query()):
            item = self._waiting.popleft()
            self._elements -= item.copy.numel()
            yield item.number, item.copy.cpu(), item
