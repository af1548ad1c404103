"""Kinds of values, conversion of arguments to another dtype, and memory filled with values of value models."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from opgrip.errors import UserError
from opgrip.replay.inputs.input_options import RANDOM, RECORDED, REPEATED, ZEROS
from opgrip.replay.operators.lookup import Unsupported
from opgrip.traces import Trace
from opgrip.traces.io.tensor_file import TensorFile, from_stored
from opgrip.traces.schema.arguments import TensorSpec, map_leaves, numbers_of, tensors
from opgrip.traces.schema.operator_arguments import schema_arguments
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.schema.tensor_specs import Compressed, Coo, Nested, map_values, memory_dtype
from opgrip.traces.values import Drawable, ValueModel, depends_on_values
from opgrip.traces.values.defaults import default_values
from opgrip.traces.values.floats import Floats

PIECE = 1 << 16  # approximate number of elements in a repeated piece
LONG_PIECE = 1 << 20  # approximate number of elements in a repeated piece in measured calls
# dtypes that are converted; values of smaller dtypes are only meaningful together with their scales
CAST = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def caster(tree: Any, dtype: torch.dtype) -> Callable[[Any], Any]:
    """Return a function that casts one tensor, dtype or number among a call's arguments to a floating-point dtype.

    tree : all arguments of the call
    """
    if not dtype.is_floating_point:
        raise ValueError(f"{dtype} is not a floating-point dtype")
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
    """Return the strided tensors in a tensor's memory: the tensor itself, or the parts of a sparse or nested one."""
    return spec.parts or (spec,)


def _check_shared(memory: list[TensorSpec]) -> None:
    dtypes: dict[int, set[torch.dtype]] = {}
    for piece in memory:
        if piece.storage is not None:
            dtypes.setdefault(piece.storage, set()).add(piece.dtype)
    if any(len(storage_dtypes) > 1 and storage_dtypes & CAST for storage_dtypes in dtypes.values()):
        raise Unsupported("arguments view the same memory as several dtypes, so they cannot be cast to another dtype")


FEW = 64  # maximum number of elements that are drawn individually even if a tensor repeats them


BLOCK = 1 << 22  # number of elements drawn at a time, a multiple of the 16 that torch draws together on a CPU


def fill(tensor: torch.Tensor, model: Drawable | None, generator: torch.Generator, drawn_as: torch.dtype) -> None:
    if 0 in tensor.shape:
        return
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    once = tensor.as_strided([1 if step == 0 else size for size, step in steps], tensor.stride())
    if prod(tensor.shape) <= FEW:
        # values may be recorded for each element, not for each location in memory
        drawn = draw(tuple(tensor.shape), drawn_as, model, generator)
        write(once, drawn[tuple(slice(size) for size in once.shape)])
        return
    whole = isinstance(model, Stored) and model.fits(tuple(once.shape), memory_dtype(drawn_as))
    if _has_windows(once) and not whole:
        # overlapping windows, such as unfold returns
        extent = 1 + sum((size - 1) * step for size, step in zip(once.shape, once.stride(), strict=True))
        once = once.as_strided((extent,), (1,))
    if model is not None or not once.is_contiguous():
        write(once, draw(tuple(once.shape), drawn_as, model, generator))
        return
    # in blocks, because values are drawn in a wider dtype
    for block in once.view(-1).split(BLOCK):
        write(block, draw(tuple(block.shape), drawn_as, None, generator))


def write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    tensor.copy_(narrowed(values, tensor.dtype))


def draw(
    shape: tuple[int, ...], dtype: torch.dtype, model: Drawable | None, generator: torch.Generator
) -> torch.Tensor:
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
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    wide = torch.complex64 if dtype.is_complex else torch.float32
    return torch.randn(shape, dtype=wide, generator=generator, device=generator.device).to(dtype)


def narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if values.dtype == dtype or not (values.dtype.is_floating_point and dtype.is_floating_point):
        return values.to(dtype)
    bounds = torch.finfo(dtype)
    if bounds.max < torch.finfo(values.dtype).max:
        # keep the lowest finite number, which masks use, finite
        values = torch.where(values.isfinite(), values.clamp(bounds.min, bounds.max), values)
    return values.to(dtype)


def _has_windows(tensor: torch.Tensor) -> bool:
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False


@dataclass(frozen=True, slots=True)
class Stored:
    model: ValueModel
    file: TensorFile
    key: str
    repeated: tuple[int, ...] = ()

    def laid_out(self, spec: TensorSpec) -> Stored:
        repeated = tuple(dimension for dimension, step in enumerate(spec.stride or ()) if step == 0)
        return replace(self, repeated=repeated) if repeated else self

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        values = self._fitting(shape, dtype)
        if values is None:
            return self.model.draw(shape, dtype, generator)
        return values.to(generator.device).expand(shape)

    def fits(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return self._fitting(shape, dtype) is not None

    def _fitting(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        once = [1 if dimension in self.repeated else size for dimension, size in enumerate(shape)]
        try:
            values = from_stored(self.file.read(self.key), dtype)
        except UserError:
            return None
        return None if values is None or values.numel() != prod(once) else values.reshape(once)


def drawn_values(trace: Trace) -> Mapping[int, Drawable]:
    if not trace.tensors:
        return trace.values
    file_of: dict[str, TensorFile] = {}
    reasons = [] if trace.tensor_files else ["their file is not next to the trace"]
    for path in trace.tensor_files:
        file = TensorFile(path)
        try:
            file_of |= dict.fromkeys(file.keys(), file)
        except UserError as error:
            reasons.append(str(error))
    stored_keys = {number: key for number, key in trace.tensors.items() if key in file_of and number in trace.values}
    if lacking := len(trace.tensors) - len(stored_keys):
        reason = "; ".join(reasons) or "the file next to the trace does not contain them"
        warnings.warn(
            f"{lacking:,} of {len(trace.tensors):,} recorded tensors are replaced by generated values: {reason}",
            RuntimeWarning,
            stacklevel=3,
        )
    stored = {number: Stored(trace.values[number], file_of[key], key) for number, key in stored_keys.items()}
    return {**trace.values, **stored}


@dataclass(frozen=True, slots=True)
class Random:
    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            return normal(shape, dtype, generator)
        return torch.randint(0, 2, shape, generator=generator, device=generator.device).to(dtype)


@dataclass(frozen=True, slots=True)
class Zeros:
    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=generator.device)


@dataclass(frozen=True, slots=True)
class RepeatedPiece:
    model: Floats
    piece: int = PIECE

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        count = prod(shape)
        # repeat whole rows, planes or images
        place = len(shape)
        while place and prod(shape[place - 1 :]) <= self.piece:
            place -= 1
        inner = shape[place:]
        rows = -(-self.piece // max(1, prod(inner)))
        if rows * prod(inner) >= count:
            return self.model.draw(shape, dtype, generator)
        piece = self.model.draw((rows, *inner), dtype, generator).reshape(-1)
        return piece.repeat(-(-count // len(piece)))[:count].reshape(shape)


_MODELS: Mapping[str, Drawable] = {RANDOM: Random(), ZEROS: Zeros()}


def with_values(
    signature: Signature, values: Mapping[int, Drawable], kind: str
) -> tuple[Signature, Mapping[int, Drawable]]:
    if kind in (RECORDED, REPEATED):
        signature, values = with_defaults(signature, values)
        return signature, (_shortened if kind == RECORDED else _repeated)(signature, values)

    def refer(leaf: object) -> object:
        return map_values(lambda number: 0, leaf) if isinstance(leaf, TensorSpec) else leaf

    changed = replace(signature, args=map_leaves(refer, signature.args), kwargs=map_leaves(refer, signature.kwargs))
    return changed, {0: _MODELS[kind]}


def _repeated(signature: Signature, values: Mapping[int, Drawable]) -> Mapping[int, Drawable]:
    numbers = {number for number in numbers_of((signature.args, signature.kwargs)) if number in values}
    models = {number: values[number] for number in numbers if number is not None}
    return {number: RepeatedPiece(model) if isinstance(model, Floats) else model for number, model in models.items()}


def _shortened(signature: Signature, values: Mapping[int, Drawable]) -> Mapping[int, Drawable]:
    if signature.kind != OPERATOR:
        return values
    names = [name for name, _ in schema_arguments(signature.op)]
    if len(names) < len(signature.args):
        return values
    large: set[int | None] = set()
    deciding: set[int | None] = set()
    for name, tree in (*zip(names, signature.args, strict=False), *signature.kwargs.items()):
        for spec in tensors(tree):
            large |= {spec.values} if prod(spec.shape) > LONG_PIECE else set()
            deciding |= {spec.values} if depends_on_values(signature.op, name, spec.dtype) else set()
    shortened = {
        number: RepeatedPiece(model, LONG_PIECE)
        for number in large - deciding
        if number is not None and isinstance(model := values.get(number), Floats)
    }
    return {**values, **shortened} if shortened else values


def with_defaults(signature: Signature, values: Mapping[int, Drawable]) -> tuple[Signature, Mapping[int, Drawable]]:
    signature, models = _fill(signature, -1)
    return signature, {**values, **models} if models else values


def trace_with_defaults(trace: Trace) -> Trace:
    signatures: list[Signature] = []
    models: dict[int, ValueModel] = {}
    for signature in trace.signatures:
        filled, own = _fill(signature, -1 - len(models))
        signatures.append(filled)
        models |= own
    return replace(trace, signatures=signatures, values={**trace.values, **models}) if models else trace


def _fill(signature: Signature, first: int) -> tuple[Signature, dict[int, ValueModel]]:
    if signature.kind != OPERATOR:
        return signature, {}
    args, kwargs, models = default_values(signature.op, signature.args, signature.kwargs, signature.outputs, first)
    return (replace(signature, args=args, kwargs=kwargs), models) if models else (signature, {})
