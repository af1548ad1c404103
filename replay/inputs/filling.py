"""Cast arguments to another dtype, and fill memory with values that value models draw."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from opgrip.errors import UserError
from opgrip.replay.operators.lookup import Unsupported
from opgrip.traces import Trace
from opgrip.traces.io.tensor_file import TensorFile, from_stored
from opgrip.traces.schema.arguments import TensorSpec, map_leaves, tensors
from opgrip.traces.schema.records import Signature
from opgrip.traces.schema.tensor_specs import Compressed, Coo, Nested, memory_dtype
from opgrip.traces.values import Drawable, ValueModel

CAST = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Dtypes that others can stand for; values of fewer bits mean something only by the scales that belong to them."""


def caster(tree: Any, dtype: torch.dtype) -> Callable[[Any], Any]:
    """What gives each argument of a call as it is where floating-point tensors have another dtype.

    A dtype among the arguments is changed where tensors of the call had it, or where the call has no such tensors. A
    number too large for the new dtype becomes the largest.

    Raises
    ------
    ValueError : for a dtype that is none of floating point
    Unsupported : where arguments see the same memory as of several dtypes
    """
    if not dtype.is_floating_point:
        raise ValueError(f"{dtype} is no floating-point dtype")
    memory = [piece for spec in tensors(tree) for piece in pieces(spec)]
    cast_dtypes = {piece.dtype for piece in memory} & CAST
    _check_shared(memory)
    most = torch.finfo(dtype).max

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, TensorSpec):
            return cast_spec(leaf, dtype)
        if isinstance(leaf, torch.dtype):
            return dtype if leaf in (cast_dtypes or CAST) else leaf
        if type(leaf) is float and math.isfinite(leaf):
            return min(max(leaf, -most), most)
        return leaf

    return cast


def cast_signature(signature: Signature, dtype: torch.dtype | None) -> Signature:
    """Return a call as it runs in another dtype, its results too; the same call where no tensor can be cast."""
    if dtype is None:
        return signature
    try:
        cast = caster((signature.args, dict(signature.kwargs)), dtype)
    except Unsupported:
        return signature
    recorded = (signature.args, dict(signature.kwargs))
    arguments = map_leaves(cast, recorded)
    if arguments == recorded:
        return signature
    args, kwargs = arguments
    return replace(signature, args=args, kwargs=kwargs, outputs=map_leaves(cast, signature.outputs))


def cast_spec(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    """A tensor, and what it is made of, in another dtype where it is of floating point."""
    if spec.dtype not in CAST:
        return spec
    made_of = spec.made_of
    match made_of:
        case Coo() | Compressed():
            made_of = replace(made_of, values=replace(made_of.values, dtype=dtype))
        case Nested():
            made_of = replace(made_of, buffer=replace(made_of.buffer, dtype=dtype))
    return replace(spec, dtype=dtype, made_of=made_of)


def pieces(spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """The strided tensors whose memory a tensor lies in: itself, or its parts."""
    return spec.parts or (spec,)


def _check_shared(memory: list[TensorSpec]) -> None:
    dtypes: dict[int, set[torch.dtype]] = {}
    for piece in memory:
        if piece.storage is not None:
            dtypes.setdefault(piece.storage, set()).add(piece.dtype)
    if any(len(storage_dtypes) > 1 and storage_dtypes & CAST for storage_dtypes in dtypes.values()):
        raise Unsupported("arguments see the same memory as of several dtypes, so it cannot be of another")


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


@dataclass(frozen=True, slots=True)
class Stored:
    """Draws what the program had, and where that cannot be had, what the value model gives.

    Attributes
    ----------
    model : stands in for values that do not fit
    repeated : the tensor's dimensions of stride 0, which the file holds once
    """

    model: ValueModel
    file: TensorFile
    key: str
    repeated: tuple[int, ...] = ()

    def laid_out(self, spec: TensorSpec) -> Stored:
        """The same for a tensor of that layout."""
        repeated = tuple(dimension for dimension, step in enumerate(spec.stride or ()) if step == 0)
        return replace(self, repeated=repeated) if repeated else self

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """The values, on the generator's device; those of repeated dimensions share memory."""
        values = self._fitting(shape, dtype)
        if values is None:
            return self.model.draw(shape, dtype, generator)
        return values.to(generator.device).expand(shape)

    def fits(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether the values themselves are drawn for a tensor of that shape."""
        return self._fitting(shape, dtype) is not None

    def _fitting(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        once = [1 if dimension in self.repeated else size for dimension, size in enumerate(shape)]
        values = self._read(dtype)
        return None if values is None or values.numel() != prod(once) else values.reshape(once)

    def _read(self, dtype: torch.dtype) -> torch.Tensor | None:
        try:
            return from_stored(self.file.read(self.key), dtype)
        except UserError:
            return None


def drawn_values(trace: Trace) -> Mapping[int, Drawable]:
    """By number, what a trace's values are drawn from: the values themselves as far as they are there, else models.

    Warns where some are not.
    """
    if not trace.tensors:
        return trace.values
    file_of: dict[str, TensorFile] = {}
    reasons = [] if trace.tensor_files else ["their file is not beside the trace"]
    for path in trace.tensor_files:
        file = TensorFile(path)
        try:
            file_of |= dict.fromkeys(file.keys(), file)
        except UserError as error:
            reasons.append(str(error))
    stored_keys = {number: key for number, key in trace.tensors.items() if key in file_of and number in trace.values}
    if lacking := len(trace.tensors) - len(stored_keys):
        reason = "; ".join(reasons) or "the file beside the trace does not hold them"
        warnings.warn(
            f"{lacking:,} of {len(trace.tensors):,} whole values are drawn from models: {reason}",
            RuntimeWarning,
            stacklevel=3,
        )
    stored = {number: Stored(trace.values[number], file_of[key], key) for number, key in stored_keys.items()}
    return {**trace.values, **stored}
