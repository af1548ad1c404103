"""Fills memory with the values that a tensor's model draws."""

from __future__ import annotations

from math import prod

import torch

from opgrip.replay.inputs.stored import Stored
from opgrip.traces.schema.tensor_specs import memory_dtype
from opgrip.traces.values import Drawable

FEW = 64
"""Elements that are drawn as they are, even where the tensor repeats them: so many a trace may hold exactly."""


def fill(tensor: torch.Tensor, model: Drawable | None, generator: torch.Generator, drawn_as: torch.dtype) -> None:
    """Draw values into a tensor whose elements may share memory with each other.

    Parameters
    ----------
    tensor : of a dtype that `memory_dtype` gives
    drawn_as : dtype of the values, of which the tensor holds the nearest

    It takes no more memory than the tensor lies in, however often that repeats its elements.
    """
    if 0 in tensor.shape:
        return
    once = _without_repeats(tensor)
    if prod(tensor.shape) <= FEW:
        # they may be recorded one by one: for each element, not for each place in memory
        drawn = draw(tuple(tensor.shape), drawn_as, model, generator)
        write(once, drawn[tuple(slice(size) for size in once.shape)])
        return
    whole = isinstance(model, Stored) and model.fits(tuple(once.shape), memory_dtype(drawn_as))
    if _has_windows(once) and not whole:
        # as unfold makes them
        once = once.as_strided((_extent(once),), (1,))
    write(once, draw(tuple(once.shape), drawn_as, model, generator))


def write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Put values into a tensor of a dtype that may be another."""
    tensor.copy_(narrowed(values, tensor.dtype))


def draw(
    shape: tuple[int, ...], dtype: torch.dtype, model: Drawable | None, generator: torch.Generator
) -> torch.Tensor:
    """Values of a model, or where there is none normal numbers, random bits and zeros."""
    device, written_as = generator.device, memory_dtype(dtype)
    if model is not None:
        return model.draw(shape, written_as, generator)
    if written_as is not dtype:
        bounds = torch.iinfo(written_as)
        values = torch.randint(bounds.min, bounds.max + 1, shape, generator=generator, device=device)
        return values.to(written_as)
    if dtype.is_floating_point or dtype.is_complex:
        return normal(shape, dtype, generator)
    # zero is a valid index into anything that is not empty
    return torch.zeros(shape, dtype=dtype, device=device)


def memory_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of some memory, (N,) uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Normal numbers of a floating-point or complex dtype, 8-bit ones too, which torch does not draw."""
    wide = torch.complex64 if dtype.is_complex else torch.float32
    return torch.randn(shape, dtype=wide, generator=generator, device=generator.device).to(dtype)


def narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values in another dtype, its largest in the place of finite ones that are larger."""
    if values.dtype == dtype or not (values.dtype.is_floating_point and dtype.is_floating_point):
        return values.to(dtype)
    bounds = torch.finfo(dtype)
    if bounds.max < torch.finfo(values.dtype).max:
        # the lowest number, as masks have it, stays a number
        values = torch.where(values.isfinite(), values.clamp(bounds.min, bounds.max), values)
    return values.to(dtype)


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """One index of each dimension that an expanded tensor repeats."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    shape = [1 if step == 0 else size for size, step in steps]
    return tensor.as_strided(shape, tensor.stride())


def _has_windows(tensor: torch.Tensor) -> bool:
    """Whether elements may overlap, as far as the strides tell."""
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False


def _extent(tensor: torch.Tensor) -> int:
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
