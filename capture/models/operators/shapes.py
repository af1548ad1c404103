"""Samples in other shapes than those of torch's table, and the random numbers of samples."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import torch

from opgrip.capture.models.operators.registered import Arguments, Entry
from opgrip.traces.schema.arguments import leaves, map_leaves


@contextmanager
def seeded(*parts: object) -> Iterator[None]:
    """Let torch, numpy and Python draw the same in the block whatever was drawn before, and go on after it as before.

    Parameters
    ----------
    parts : what the seed is made of
    """
    seed = int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big")
    of_numpy, of_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)


LARGE_ELEMENTS = 1 << 20
"""Of the largest tensor of a large sample."""
MOST_ELEMENTS = 1 << 24
"""Of any tensor of it: of tensors with other dimensions the sizes grow alike."""
RANDOM_SIZES = (2, 96)
"""Least and largest of drawn sizes."""
CUBIC = frozenset({"linalg", "gemm", "attention"})
"""Categories whose work grows faster than their tensors."""
CUBIC_ELEMENTS = 1 << 18
OF_BATCH = frozenset({"convolution", "pooling", "normalization", "resizing"})
"""Categories whose other sizes are of kernels and channels, which belong together: their batch alone is larger."""

Sizes = Callable[[int], int]


def enlarge(entry: Entry, sample: Arguments) -> Iterator[Arguments]:
    """A sample with tensors of about a million elements: all sizes larger by a factor, or that of the batch alone."""
    largest = max(_dense_tensors(sample), key=lambda tensor: tensor.numel(), default=None)
    if largest is None or not largest.numel():
        return
    elements = CUBIC_ELEMENTS if entry.categories & CUBIC else LARGE_ELEMENTS
    growing = sum(size > 1 for size in largest.shape)
    if growing and not entry.categories & OF_BATCH:
        factor = round((elements / largest.numel()) ** (1 / growing))
        if factor > 1:
            yield from _resized(sample, lambda size: size * factor if size > 1 else size)
    yield from _with_batch(sample, max(1, elements // largest.numel()))


def draw(entry: Entry, sample: Arguments) -> Iterator[Arguments]:
    """A sample whose sizes are drawn: those that are equal stay equal, or that of the batch alone."""
    drawn: dict[int, int] = {}

    def size_of(size: int) -> int:
        return drawn.setdefault(size, random.randint(*RANDOM_SIZES)) if size > 1 else size

    if not entry.categories & OF_BATCH:
        yield from _resized(sample, size_of)
    yield from _with_batch(sample, random.randint(*RANDOM_SIZES))


RESIZERS: Mapping[str, Callable[[Entry, Arguments], Iterator[Arguments]]] = {"large": enlarge, "random": draw}
"""By the choices of `--shapes`."""


def _resized(sample: Arguments, size_of: Sizes) -> Iterator[Arguments]:
    """The sample with each size of its tensors by a rule; nothing where it has tensors of another kind, or large."""
    tensors = list(_tensors(sample))
    if len(tensors) != len(list(_dense_tensors(sample))):
        return
    if any(prod(map(size_of, tensor.shape)) > MOST_ELEMENTS for tensor in tensors):
        return
    yield _map_tensors(sample, lambda tensor: grown(tensor, tuple(map(size_of, tensor.shape))))


def _with_batch(sample: Arguments, factor: int) -> Iterator[Arguments]:
    """The sample with a larger first dimension of its first tensor."""
    first = next(_dense_tensors(sample), None)
    if first is None or not first.dim() or factor < 2 or first.numel() * factor > MOST_ELEMENTS:
        return
    larger = grown(first, (first.shape[0] * factor, *first.shape[1:]))
    yield _map_tensors(sample, lambda tensor: larger if tensor is first else tensor)


def grown(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of another shape, its values repeated as often as it takes, which keeps indices and masks valid."""
    values = tensor.detach().resolve_conj().resolve_neg()
    for dim, size in enumerate(shape):
        if size > values.shape[dim] and values.shape[dim]:
            copies = -(-size // values.shape[dim])
            values = torch.cat([values] * copies, dim)
        values = values.narrow(dim, 0, min(size, values.shape[dim]))
    if not values.is_contiguous() or values.data_ptr() == tensor.data_ptr():
        values = values.clone(memory_format=torch.contiguous_format)
    return values.requires_grad_(tensor.requires_grad)


def _map_tensors(sample: Arguments, function: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
    def change(leaf: Any) -> Any:
        return function(leaf) if isinstance(leaf, torch.Tensor) else leaf

    args, kwargs = map_leaves(change, sample)
    return args, kwargs


def _tensors(sample: Arguments) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves(list(sample)) if isinstance(leaf, torch.Tensor))


def _dense_tensors(sample: Arguments) -> Iterator[torch.Tensor]:
    return (
        tensor
        for tensor in _tensors(sample)
        if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    )
