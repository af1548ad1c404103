"""Numbers of storages, which connect a call's arguments to the calls that produced them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import count

import torch

from opgrip.capture.torch_compat.torch_private import pin, storage_address, storage_is_gone, unpin, without_functions
from opgrip.errors import raise_if_from_program
from opgrip.traces.schema.records import NO_STORAGE

# number of new storages, and of their bytes in the host's memory, after which `sweep` looks for freed ones. The limits
# are low because the addresses are then still in the processor's cache, and because pinned addresses fragment the
# memory of the host's allocator.
SWEEP, SWEEP_BYTES = 256, 1 << 25
# number of sweeps after which remaining storages move to a list that is swept less often, and number of sweeps after
# which that list is swept
MIDDLE_SWEEPS, OLD_SWEEPS = 8, 64


class StorageNumbers:
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
        """Return the number of a tensor's storage, or `NO_STORAGE` for a tensor without storage."""
        try:
            number = self.numbers.get(storage_address(tensor))
            if number is None:
                with without_functions():
                    number = self._add(tensor.untyped_storage(), tensor.is_cpu)
            return number
        except (RuntimeError, NotImplementedError) as error:
            raise_if_from_program(error)
            # sparse layouts, and subclasses without memory
            return NO_STORAGE

    def numbers_of(self, tensors: Iterable[torch.Tensor | None]) -> list[int]:
        number, add = self.numbers.get, self._add
        numbers: list[int] = []
        for tensor in tensors:
            if tensor is not None:
                own = number(storage_address(tensor))
                numbers.append(add(tensor.untyped_storage(), tensor.is_cpu) if own is None else own)
        return numbers

    def sweep(self) -> None:
        if self._sweeping.locked():
            return
        with self._sweeping:
            self._sweeps += 1
            self._forget(self._middle)
            if self._sweeps % MIDDLE_SWEEPS == 0:
                self._old += self._middle
                del self._middle[:]
            # not merged with the old ones yet: a storage in use at one sweep is often gone by the next
            self._forget(self.young)
            self._middle += self.young
            del self.young[:]
            if self._sweeps % OLD_SWEEPS == 0:
                self._forget(self._old)

    def close(self) -> None:
        with self._sweeping:
            for addresses in (self.young, self._middle, self._old):
                while addresses:
                    address = addresses[-1]
                    del addresses[-1], self.numbers[address]
                    unpin(address)

    def _add(self, storage: torch.UntypedStorage, is_on_host: bool) -> int:
        address, number = pin(storage), next(self.new_number)
        registered_number = self.numbers.setdefault(address, number)
        if registered_number == number:
            self.young.append(address)
        else:
            # another thread was faster; the address must be pinned only once
            unpin(address)
        if is_on_host:
            self._unswept_bytes += storage.nbytes()
            if self._unswept_bytes > SWEEP_BYTES:
                self._unswept_bytes = 0
                self.sweep()
        return registered_number

    def _forget(self, addresses: list[int]) -> None:
        # Other threads may extend the list, and an exception of the program may interrupt this at any point. Even then,
        # an address is in a list exactly as long as it is pinned, and never twice.
        place = len(addresses)
        while place:
            place -= 1
            address = addresses[place]
            if storage_is_gone(address):
                # remove the number first: once unpinned, the address may belong to another storage
                del self.numbers[address]
                addresses[place] = addresses[-1]
                del addresses[-1]
                unpin(address)
