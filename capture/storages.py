"""Numbers for the memory that tensors live in, so that a call's arguments can be traced to the calls that made them.

An address alone would not do: it is given to another storage when the first is freed. So every storage that has a
number is pinned: its memory is freed as ever, its address is kept from use until `sweep` has seen that it is gone.
"""

from __future__ import annotations

import threading
from itertools import count

import torch

from opgrip.capture.torch_private import pin_storage, storage_address, storage_is_gone, unpin_storage
from opgrip.traces.records import NO_STORAGE

OLD_SWEEPS = 20
"""Storages that have lived through one sweep are looked at again at every so many."""


class Storages:
    """The numbers of all storages that calls took or gave.

    Attributes
    ----------
    numbers : number of each pinned address; the hot path looks here
    """

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self._counter = count()
        self._young: list[int] = []
        self._old: list[int] = []
        self._sweeps = 0
        self._sweeping = threading.Lock()

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, a new one where it has none; `NO_STORAGE` for a tensor without one."""
        try:
            known = self.numbers.get(storage_address(tensor))
            return self.pinned(pin_storage(tensor)) if known is None else known
        except (RuntimeError, NotImplementedError):
            # sparse layouts, and subclasses that are no memory themselves
            return NO_STORAGE

    def pinned(self, address: int) -> int:
        """The number of a storage that was just pinned."""
        known = self.numbers.get(address)
        if known is None:
            number = next(self._counter)
            known = self.numbers.setdefault(address, number)
            if known == number:
                self._young.append(address)
                return number
        # pinned before: once is enough
        unpin_storage(address)
        return known

    def sweep(self) -> None:
        """Forget the storages that are gone, and let their addresses be used again."""
        with self._sweeping:
            self._sweeps += 1
            young = len(self._young)
            self._old += self._forget(self._young[:young])
            del self._young[:young]
            if self._sweeps % OLD_SWEEPS == 0:
                self._old = self._forget(self._old)

    def close(self) -> None:
        """Forget all storages."""
        with self._sweeping:
            for address in [*self._young, *self._old]:
                del self.numbers[address]
                unpin_storage(address)
            self._young.clear()
            self._old.clear()

    def _forget(self, addresses: list[int]) -> list[int]:
        alive = []
        for address in addresses:
            if storage_is_gone(address):
                # first the number: once unpinned, the address may be another storage's
                del self.numbers[address]
                unpin_storage(address)
            else:
                alive.append(address)
        return alive
