"""Numbers for the memory that tensors live in, so that a call's arguments can be traced to the calls that made them.

An address alone would not do: it is given to another storage when the first is freed. So every storage that has a
number is pinned: its memory is freed as ever, its address is kept from use until `sweep` has seen that it is gone.
"""

from __future__ import annotations

import threading
from itertools import count

import torch

from opgrip.capture.torch_compat.torch_private import pin, storage_address, storage_is_gone, unpin
from opgrip.errors import raise_if_from_program
from opgrip.traces.schema.records import NO_STORAGE

SWEEP, SWEEP_BYTES = 256, 1 << 25
"""New storages, and bytes in them, after which those that are gone are looked for. Soon: their addresses are in the
processor's cache, and beside what keeps an address the allocator leaves holes."""
MIDDLE_SWEEPS, OLD_SWEEPS = 8, 64
"""After so many sweeps, storages that lived on are looked at no more in each one, and those are looked at again."""


class StorageNumbers:
    """The numbers of all storages that calls took or gave.

    Attributes
    ----------
    numbers : number of each pinned address
    new_number : the numbers to come
    young : the addresses that were pinned since the last sweep

    The hot path reads and adds to these itself.
    """

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.new_number = count()
        self.young: list[int] = []
        self._middle: list[int] = []
        self._old: list[int] = []
        self._unswept_bytes = 0
        self._sweeps = 0
        self._sweeping = threading.Lock()

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, a new one where it has none; `NO_STORAGE` for a tensor without one."""
        try:
            number = self.numbers.get(storage_address(tensor))
            if number is None:
                storage = tensor.untyped_storage()
                number = self._first(pin(storage))
                self._unswept_bytes += storage.nbytes()
                if self._unswept_bytes > SWEEP_BYTES:
                    self._unswept_bytes = 0
                    self.sweep()
            return number
        except (RuntimeError, NotImplementedError) as error:
            raise_if_from_program(error)
            # sparse layouts, and subclasses that are no memory themselves
            return NO_STORAGE

    def sweep(self) -> None:
        """Forget the storages that are gone, and let their addresses be used again."""
        if self._sweeping.locked():
            return
        with self._sweeping:
            self._sweeps += 1
            self._forget(self._middle)
            if self._sweeps % MIDDLE_SWEEPS == 0:
                self._old += self._middle
                del self._middle[:]
            # not among the old ones by now: what is in use at a sweep is often gone by the next
            self._forget(self.young)
            self._middle += self.young
            del self.young[:]
            if self._sweeps % OLD_SWEEPS == 0:
                self._forget(self._old)

    def close(self) -> None:
        """Forget all storages."""
        with self._sweeping:
            for addresses in (self.young, self._middle, self._old):
                while addresses:
                    address = addresses[-1]
                    del addresses[-1], self.numbers[address]
                    unpin(address)

    def _first(self, address: int) -> int:
        number = next(self.new_number)
        registered_number = self.numbers.setdefault(address, number)
        if registered_number == number:
            self.young.append(address)
        else:
            # another thread was faster: pinned once is enough
            unpin(address)
        return registered_number

    def _forget(self, addresses: list[int]) -> None:
        """Remove the addresses of storages that are gone from a list, to which other threads may add meanwhile.

        An exception of the program may end this anywhere between two calls: an address is in a list as long as it is
        pinned, and never twice.
        """
        place = len(addresses)
        while place:
            place -= 1
            address = addresses[place]
            if storage_is_gone(address):
                # first the number: once unpinned, the address may be another storage's
                del self.numbers[address]
                addresses[place] = addresses[-1]
                del addresses[-1]
                unpin(address)
