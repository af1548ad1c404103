"""Numpy arrays over the memory of tensors, which stay as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_FORMS = {
    dtype: np.dtype(form).str
    for dtype, form in {
        torch.bool: "?",
        torch.uint8: "u1",
        torch.uint16: "u2",
        torch.uint32: "u4",
        torch.uint64: "u8",
        torch.int8: "i1",
        torch.int16: "i2",
        torch.int32: "i4",
        torch.int64: "i8",
        torch.float16: "f2",
        torch.float32: "f4",
        torch.float64: "f8",
        torch.complex64: "c8",
        torch.complex128: "c16",
    }.items()
}
"""What numpy calls the dtypes that it has too."""


class _Memory:
    """What an array takes its memory from, and holds for as long as it lives."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor, form: dict[str, Any]) -> None:
        self.tensor = tensor
        self.__array_interface__ = form


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor's elements as an array of its shape: read-only, over its memory, which it keeps.

    `Tensor.numpy` makes memory that cannot be resized any more, so that the program could neither free a parameter's
    memory nor let an output grow. Here it stays as it is, and must not be resized while the array is in use.

    Raises
    ------
    TypeError, RuntimeError : as `Tensor.numpy`, where numpy has no such dtype or the memory is not the host's
    ValueError : where the program has freed the memory
    """
    form = _FORMS.get(tensor.dtype)
    if form is None or not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
        return tensor.numpy()
    shape = tuple(tensor.shape)
    if not tensor.numel():
        return np.empty(shape, form)
    address = tensor.data_ptr()
    if not address:
        raise ValueError("a tensor whose memory is freed")
    size = tensor.itemsize
    strides = None if tensor.is_contiguous() else tuple(step * size for step in tensor.stride())
    interface = {"shape": shape, "typestr": form, "data": (address, True), "strides": strides, "version": 3}
    return np.asarray(_Memory(tensor, interface))
