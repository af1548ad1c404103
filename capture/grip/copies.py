"""Copies of live arguments, conversion of numpy arrays to tensors over the same memory, and exact comparison."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from opgrip.capture.torch_compat.torch_private import storage_address, without_functions, without_modes
from opgrip.traces.rebuild import as_result
from opgrip.traces.schema.arguments import leaves, map_leaves
from opgrip.traces.schema.python_objects import ArraySpec, children, outline

Array = np.ndarray[Any, Any]


class Arrays:
    """Converts numpy arrays to `ArraySpec` objects, which hold a tensor over the array's memory.

    Views of one array become tensors in one storage.
    """

    def __init__(self) -> None:
        self._memory: dict[int, tuple[Array, torch.Tensor]] = {}

    def take(self, array: Array) -> ArraySpec:
        """Return the `ArraySpec` of an array; its tensor is a copy if torch does not support the array's strides.

        Raises TypeError, ValueError: the array's dtype does not exist in torch.
        """
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        root = _root(array)
        offset, size = _address(array) - _address(root), array.itemsize
        steps = [step if length > 1 else size for length, step in zip(array.shape, array.strides, strict=True)]
        fits = all(step >= 0 and step % size == 0 for step in (*steps, offset, root.nbytes))
        # torch warns about read-only memory
        if not fits or not array.size or not root.flags.c_contiguous or not root.flags.writeable:
            return ArraySpec(torch.from_numpy(np.array(array, order="C")))
        memory = self._over(root).view(dtype)
        return ArraySpec(memory.as_strided(array.shape, [step // size for step in steps], offset // size))

    def _over(self, root: Array) -> torch.Tensor:
        # one tensor for each array, so that its views share a storage
        if id(root) not in self._memory:
            self._memory[id(root)] = root, torch.from_numpy(root.reshape(-1).view(np.uint8))
        return self._memory[id(root)][1]


def _root(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


ALIGNMENT = 16  # alignment of copies in memory in bytes, sufficient for every dtype


@contextmanager
def isolate_from_program() -> Iterator[None]:
    """Run the block without the program's dispatch and function modes and without gradients."""
    # leave inference mode, because tensors created inside it cannot be used outside
    with without_modes(), without_functions(), torch.inference_mode(False), torch.no_grad():
        yield


def copy_tensors(tree: Any) -> Any:
    """Return nested values with copies of their tensors, which keep strides and share memory as the originals do."""
    with isolate_from_program():
        tensors = [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]
        copies = iter(_copies([tensor.resolve_conj().resolve_neg() for tensor in tensors]))
    return map_leaves(lambda leaf: next(copies) if isinstance(leaf, torch.Tensor) else leaf, tree)


def bytes_of(tree: Any) -> int:
    """Return the number of bytes of memory that the tensors in nested values use; shared memory counts once."""
    spans = _spans(leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))
    return sum(end - first for first, end in spans.values())


def alike(one: Any, other: Any) -> bool:
    """Return True if two nested values are equal, including every bit of their tensors."""
    with isolate_from_program():
        return _alike(one, other)


def _alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and _equal(one, other)
    if isinstance(one, torch.Tensor):
        return _equal(one, other)
    inner, its = children(one), children(other)
    if inner is None or its is None:
        # nan != nan, while 1 == True
        return _represent(one) == _represent(other)
    names = outline(one) == outline(other) and (not isinstance(one, dict) or [*one] == [*other])
    return names and len(inner) == len(its) and all(map(_alike, inner, its))


def _represent(leaf: Any) -> object:
    return sorted(map(repr, leaf)) if isinstance(leaf, set | frozenset) else repr(leaf)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if one.is_meta or one.numel() == 0:
        return True
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    spans = _spans(tensors)
    memory = {}
    for tensor in tensors:
        address = storage_address(tensor)
        if address not in memory:
            first, end = spans[address]
            memory[address] = _part(tensor, first // ALIGNMENT * ALIGNMENT, end)
    return [_over(tensor, spans[storage_address(tensor)][0], memory[storage_address(tensor)]) for tensor in tensors]


def _over(tensor: torch.Tensor, first: int, memory: torch.UntypedStorage) -> torch.Tensor:
    offset = tensor.storage_offset() - first // ALIGNMENT * ALIGNMENT // tensor.dtype.itemsize
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy = empty.set_(memory, offset if tensor.numel() else 0, tensor.shape, tensor.stride())
    return as_result(copy) if tensor.requires_grad else copy


def _part(tensor: torch.Tensor, first: int, end: int) -> torch.UntypedStorage:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), first, (end - first,), (1,)).clone().untyped_storage()


def _spans(tensors: Iterable[torch.Tensor]) -> dict[int, tuple[int, int]]:
    spans: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        address, (first, end) = storage_address(tensor), _span(tensor)
        span = spans.get(address, (first, end))
        spans[address] = min(span[0], first), max(span[1], end)
    return spans


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    size, offset = tensor.dtype.itemsize, int(tensor.storage_offset())
    return offset * size, (offset + int(reach) + 1) * size
