"""Numpy arrays as tensors over their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from opgrip.traces.schema.python_objects import ArraySpec

Array = np.ndarray[Any, Any]


class Arrays:
    """Takes arrays, those that are views of one array as tensors in one storage."""

    def __init__(self) -> None:
        self._memory: dict[int, tuple[Array, torch.Tensor]] = {}

    def take(self, array: Array) -> ArraySpec:
        """An array as the tensor over its memory, or over a copy, where torch has no such layout.

        Raises
        ------
        TypeError, ValueError : for a dtype that torch does not have
        """
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        root = _root(array)
        offset, size = _address(array) - _address(root), array.itemsize
        steps = [step if length > 1 else size for length, step in zip(array.shape, array.strides, strict=True)]
        fits = all(step >= 0 and step % size == 0 for step in (*steps, offset, root.nbytes))
        # torch warns of memory that it may not write
        if not fits or not array.size or not root.flags.c_contiguous or not root.flags.writeable:
            return ArraySpec(torch.from_numpy(np.array(array, order="C")))
        memory = self._over(root).view(dtype)
        return ArraySpec(memory.as_strided(array.shape, [step // size for step in steps], offset // size))

    def _over(self, root: Array) -> torch.Tensor:
        """The bytes of an array, as one tensor whenever they are asked for."""
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
