"""The tensors of a call as Python's source: metadata as recorded, over memory that is shared where it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch

from opgrip.errors import UserError
from opgrip.traces.schema.tensor_specs import TensorSpec
from opgrip.traces.scripts.literals import Literals
from opgrip.traces.scripts.literals import shape as sizes
from opgrip.traces.scripts.values import FEW, ValueSource
from opgrip.traces.values import Drawable

ADDRESSES = 1 << 62


def tensor_lines(
    specs: Sequence[TensorSpec], values: Mapping[int, Drawable], literals: Literals, source: ValueSource
) -> Iterator[str]:
    """The statements that make the tensors `x0`, `x1`, ... in their order.

    Raises
    ------
    UserError : for a tensor that no script can make
    """
    for spec in specs:
        _check(spec)
    fills: list[tuple[int, str]] = []
    memory: dict[int, str] = {}
    for place, spec in enumerate(specs):
        model = None if spec.values is None else values.get(spec.values)
        name, device = f"x{place}", literals.device(spec.device)
        if spec.storage is None and spec.offset == 0 and _is_plain(spec):
            moved = "" if device == '"cpu"' else f".to({device})"
            yield f"{name} = {source.of(model, spec.shape, spec.dtype)}{moved}"
            continue
        number = spec.storage if spec.storage is not None else -1 - place
        if number not in memory:
            memory[number] = f"memory{len(memory)}"
            alike = [item for item in specs if item.storage == spec.storage] if spec.storage is not None else [spec]
            size = max(item.extent for item in alike)
            yield f"{memory[number]} = torch.zeros({size}, dtype=torch.uint8, device={device}).untyped_storage()"
        source.helpers.add("view")
        yield f"{name} = {_view(memory[number], spec, spec.shape, spec.stride or ())}"
        if prod(spec.shape):
            fills.append((place, memory[number]))
    # of tensors in the same memory, the smaller or wider tells more of what is there
    for place, name in sorted(fills, key=lambda item: -prod(specs[item[0]].shape)):
        spec = specs[place]
        source.helpers.add("fill")
        yield _fill(place, name, spec, None if spec.values is None else values.get(spec.values), source)
    for place, spec in enumerate(specs):
        yield from _bits(f"x{place}", spec)


def _check(spec: TensorSpec) -> None:
    name = str(spec.layout).removeprefix("torch.")
    if spec.cls is not None or spec.made_of is not None or spec.layout is not torch.strided or spec.stride is None:
        kind = spec.cls if spec.cls is not None else "quantized" if spec.layout is torch.strided else name
        raise UserError(f"a tensor of it is {str(kind)[:60]!r}", "a script makes plain ones alone: opreplay runs it")
    if spec.device == "meta":
        raise UserError("a tensor of it is on the meta device", "it does no work there")
    if spec.extent >= ADDRESSES or prod(spec.shape) >= ADDRESSES:
        raise UserError("a tensor of it needs more memory than there are addresses", "choose another case")
    if spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype in _WHOLE:
        return
    raise UserError(f"a tensor of it has the dtype {str(spec.dtype).removeprefix('torch.')}", "opreplay runs it")


_WHOLE = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
)


def _is_plain(spec: TensorSpec) -> bool:
    """Whether its elements lie one after the other."""
    step = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride or ()), strict=True):
        # torch does not look at the stride of a single element, and neither does it keep it
        if stride != step:
            return False
        step *= max(size, 1)
    return True


def _view(memory: str, spec: TensorSpec, shape: Sequence[int], stride: Sequence[int]) -> str:
    return f"view({memory}, {spec.dtype}, {spec.offset}, {sizes(shape)}, {sizes(stride)})"


def _fill(place: int, memory: str, spec: TensorSpec, model: Drawable | None, source: ValueSource) -> str:
    stride = spec.stride or ()
    once = tuple(1 if step == 0 else size for size, step in zip(spec.shape, stride, strict=True))
    if prod(spec.shape) <= FEW:
        # recorded one by one: for each element, not for each place in memory
        return f"fill(x{place}, {source.of(model, spec.shape, spec.dtype)})"
    if _has_windows(once, stride):
        length = 1 + sum((size - 1) * step for size, step in zip(once, stride, strict=True))
        flat = _view(memory, spec, (length,), (1,))
        return f"fill({flat}, {source.of(model, (length,), spec.dtype)})"
    return f"fill(x{place}, {source.of(model, once, spec.dtype)})"


def _has_windows(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements may overlap, as far as the strides tell."""
    reach = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False


def _bits(name: str, spec: TensorSpec) -> Iterator[str]:
    if spec.conj:
        yield f"{name} = {name}.conj()"
    if spec.neg:
        yield f"{name} = torch._neg_view({name})"
    if spec.requires_grad:
        yield f"{name}.requires_grad_()"
