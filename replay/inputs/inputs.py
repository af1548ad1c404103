"""The arguments of a call, created from recorded metadata, with values drawn from value models."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from opgrip.errors import one_line
from opgrip.replay.inputs.filling import caster, fill, memory_of, pieces, write
from opgrip.replay.inputs.layouts import as_argument, assemble, check_layout, draw_indices, empty_quantized, pack
from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.operators.memory import Arguments, tensors_in
from opgrip.traces.schema.arguments import (
    GeneratorSpec,
    GroupSpec,
    Opaque,
    ReductionSpec,
    TensorSpec,
    leaves,
    map_leaves,
    tensors,
)
from opgrip.traces.schema.tensor_specs import QUANTIZED, STORAGE, memory_dtype
from opgrip.traces.values import Drawable


@dataclass(frozen=True, slots=True)
class DeviceMap:
    recorded: str
    replay_device: str | None

    def __call__(self, device: str) -> str:
        if self.replay_device is None:
            return device
        if self.replay_device == "cpu" or device.partition(":")[0] == self.recorded.partition(":")[0]:
            return self.replay_device
        return device

    @property
    def pins(self) -> bool:
        return torch.device(self.replay_device or self.recorded).type != "cpu" and torch.accelerator.is_available()


ADDRESSES = 1 << 63  # size of the address space in bytes


def device_map(recorded: str, replay_device: str | None) -> DeviceMap:
    return DeviceMap(recorded, replay_device)


@dataclass(frozen=True, slots=True)
class _Piece:
    spec: TensorSpec
    storage: int
    drawn_as: torch.dtype


@dataclass(frozen=True, slots=True)
class _Planned:
    spec: TensorSpec
    pieces: tuple[_Piece, ...]


class Inputs:
    """The arguments of one case in memory, which can be restored to their initial values."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        values: Mapping[int, Drawable],
        place: DeviceMap,
        seed: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._place = place
        self._storages: list[torch.UntypedStorage] = []
        self._pristine: list[torch.UntypedStorage] = []
        self.is_changed = True  # False if the values were restored and no run has changed them since
        recorded = list(tensors([args, dict(kwargs)]))
        self._args, self._kwargs = _cast(args, kwargs, dtype)
        _check_leaves([self._args, self._kwargs])
        with _as_unsupported():
            self._planned = self._plan(list(tensors([self._args, self._kwargs])), recorded)
            self._fill(values, seed)
            # create the arguments once, so that errors of torch are raised here
            self.make()
        # by tensor argument: number of bytes that the process had used when it used the argument last
        self.used_at = [0] * len(self._planned)

    @staticmethod
    def bytes_needed(args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype | None = None) -> int:
        tree = _cast(args, kwargs, dtype)
        memory = [piece for spec in tensors(tree) for piece in pieces(spec)]
        return sum(max(memory[place].extent for place in places) for places in _by_storage(memory))

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages)

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        return self._storages

    def copy(self, keep: bool = True) -> Inputs:
        twin = copy.copy(self)
        twin._storages = [storage.clone() for storage in self._pristine or self._storages]
        twin.used_at = list(self.used_at)
        if keep and not self._pristine:
            twin.keep()
        return twin

    def copy_arguments(self) -> Arguments:
        twin = copy.copy(self)
        twin._storages = [storage.clone() for storage in self._storages]
        return twin.make()

    def make(self) -> Arguments:
        plan = iter(self._planned)

        def build(leaf: Any) -> Any:
            if isinstance(leaf, TensorSpec):
                return self._build_tensor(next(plan))
            if isinstance(leaf, GeneratorSpec):
                return torch.Generator(self._place(leaf.device)).manual_seed(leaf.seed)
            if isinstance(leaf, torch.device):
                return torch.device(self._place(str(leaf)))
            return leaf

        args, kwargs = map_leaves(build, self._args), map_leaves(build, self._kwargs)
        return tuple(map(pack, args)), {name: pack(value) for name, value in kwargs.items()}

    def memory_of(self, number: int) -> list[torch.Tensor]:
        return [memory_of(self._storages[piece.storage]) for piece in self._planned[number].pieces]

    def has_values_of(self, other: Inputs) -> bool:
        pairs = zip(self._storages, other._storages, strict=True)
        return all(torch.equal(memory_of(one), memory_of(two)) for one, two in pairs)

    def overwrite(self, other: Inputs, arguments: Arguments) -> Arguments:
        """Write the values of `other` into this memory, and return `arguments`, remade if some are copies of it."""
        for storage, values in zip(self._storages, other._storages, strict=True):
            storage.copy_(values)
        own = [item for item in tensors_in(list(arguments)) if item.layout is torch.strided and not item.is_nested]
        for tensor in own:
            torch.autograd.graph.increment_version(tensor)
        are_same = {item.untyped_storage()._cdata for item in own} == {item._cdata for item in self._storages}
        return arguments if are_same else self.make()

    def keep(self) -> None:
        self._pristine = [storage.clone() for storage in self._storages]

    def restore(self) -> None:
        for storage, pristine in zip(self._storages, self._pristine, strict=True):
            if storage.nbytes() != pristine.nbytes():
                storage.resize_(pristine.nbytes())
            storage.copy_(pristine)
        self.is_changed = False

    def change(self, amount: float) -> None:
        """Change floating-point values slightly and at random."""
        for memory in self._float_memory():
            most = max(amount, 8 * torch.finfo(memory.dtype).eps)
            least, largest = torch.aminmax(memory.nan_to_num())
            if bool(least == largest):
                noise = most * torch.rand(memory.shape, device=memory.device)
                memory.copy_(noise if not largest else memory * (1 - noise))
            else:
                memory.mul_(1 - most * float(torch.rand(())))
        if self._pristine:
            self.keep()

    def reorder(self) -> None:
        """Move the rows of floating-point tensors by a random number of places; those with rows in order stay."""
        for view in (self._view(piece) for planned in self._planned for piece in planned.pieces):
            dimension = next((number for number, size in enumerate(view.shape) if size > 1), None)
            if dimension is None or not view.is_floating_point() or 0 in view.stride():
                continue
            steps = view.diff(dim=dimension)
            if not bool((steps >= 0).all()) and not bool((steps <= 0).all()):
                view.copy_(view.roll(int(torch.randint(1, view.shape[dimension], ())), dimension))
        if self._pristine:
            self.keep()

    def _float_memory(self) -> list[torch.Tensor]:
        dtypes: dict[int, set[torch.dtype]] = {}
        for piece in (piece for planned in self._planned for piece in planned.pieces):
            dtypes.setdefault(piece.storage, set()).add(memory_dtype(piece.spec.dtype))
        return [
            torch.empty(0, dtype=dtype, device=self._storages[number].device).set_(self._storages[number])
            for number, (dtype, *others) in ((number, tuple(own)) for number, own in dtypes.items())
            if dtype.is_floating_point and dtype.itemsize > 1 and not others and self._storages[number].nbytes()
        ]

    def written(self) -> frozenset[int]:
        """Return the indices of the tensor arguments in storages that have changed since `keep` stored them."""
        changed = {
            number
            for number, (storage, pristine) in enumerate(zip(self._storages, self._pristine, strict=True))
            if storage.nbytes() != pristine.nbytes() or not torch.equal(memory_of(storage), memory_of(pristine))
        }
        return frozenset(
            place
            for place, planned in enumerate(self._planned)
            if not changed.isdisjoint(piece.storage for piece in planned.pieces)
        )

    def _plan(self, specs: list[TensorSpec], recorded: list[TensorSpec]) -> list[_Planned]:
        for spec in specs:
            _check_supported(spec)
        memory = [piece for spec in specs for piece in pieces(spec)]
        drawn_as = [piece.dtype for spec in recorded for piece in pieces(spec)]
        storages = _by_storage(memory)
        number: dict[int, int] = {}
        for places in storages:
            members = [memory[place] for place in places]
            size, pinned = max(piece.extent for piece in members), any(piece.pinned for piece in members)
            number |= dict.fromkeys(places, len(self._storages))
            self._storages.append(_zeros(size, self._place(members[0].device), pinned and self._place.pins))
        planned = (_Piece(piece, number[place], drawn_as[place]) for place, piece in enumerate(memory))
        return [_Planned(spec, tuple(next(planned) for _ in pieces(spec))) for spec in specs]

    def _fill(self, values: Mapping[int, Drawable], seed: int) -> None:
        generators: dict[str, torch.Generator] = {}
        # of tensors that share memory, fill the smallest last: its value model is the most specific
        for planned in sorted(self._planned, key=lambda planned: -prod(planned.spec.shape)):
            device = self._place(planned.spec.device)
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            generator = generators[device]
            indices = draw_indices(planned.spec, values, generator)
            for piece, drawn in zip(planned.pieces, indices, strict=False):
                write(self._view(piece), drawn)
            # storages stay zero: as floats, random bytes are infinite or not a number
            for piece in () if planned.spec.cls == STORAGE else planned.pieces[len(indices) :]:
                model = None if piece.spec.values is None else values.get(piece.spec.values)
                fill(self._view(piece, memory_dtype(piece.spec.dtype)), model, generator, piece.drawn_as)

    def _view(self, piece: _Piece, dtype: torch.dtype | None = None) -> torch.Tensor:
        spec, storage = piece.spec, self._storages[piece.storage]
        assert spec.stride is not None, "checked when the tensors were planned"
        if dtype is None and spec.dtype in QUANTIZED:
            empty = empty_quantized(spec, storage.device)
        else:
            empty = torch.empty(0, dtype=dtype or spec.dtype, device=storage.device)
        return empty.set_(storage, spec.offset, spec.shape, spec.stride)

    def _build_tensor(self, planned: _Planned) -> torch.Tensor | torch.UntypedStorage:
        spec, views = planned.spec, [self._view(piece) for piece in planned.pieces]
        return as_argument(as_recorded(assemble(spec, views) if spec.parts else views[0], spec), spec)


def as_recorded(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return a tensor with the flags that the trace records: conjugated, negated, requires gradient."""
    if spec.conj:
        tensor = tensor.conj()
    if spec.neg:
        tensor = torch._neg_view(tensor)
    return tensor.requires_grad_() if spec.requires_grad else tensor


def _cast(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if dtype is None:
        return args, dict(kwargs)
    cast = caster([args, dict(kwargs)], dtype)
    return map_leaves(cast, args), map_leaves(cast, dict(kwargs))


def _by_storage(memory: list[TensorSpec]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for place, piece in enumerate(memory):
        groups.setdefault(("own", place) if piece.storage is None else piece.storage, []).append(place)
    return list(groups.values())


def _check_leaves(tree: Any) -> None:
    for leaf in leaves(tree):
        if isinstance(leaf, Opaque):
            raise Unsupported(f"a trace cannot hold an argument of type {leaf.type_name}")
    if any(isinstance(leaf, GroupSpec | ReductionSpec) for leaf in leaves(tree)):
        raise Unsupported("it takes a process group, which does not exist in a replay")


def _check_supported(spec: TensorSpec) -> None:
    if spec.cls not in (None, STORAGE):
        raise Unsupported(f"an argument is a {spec.cls}, not a plain tensor")
    if spec.device == "meta":
        raise Unsupported("an argument is on the meta device, on which nothing is computed")
    check_layout(spec)


def _zeros(size: int, device: str, pinned: bool) -> torch.UntypedStorage:
    if size >= ADDRESSES:
        raise Unsupported("an argument needs more memory than a process can address")
    if pinned and device == "cpu":
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True).untyped_storage()
    return torch.zeros(size, dtype=torch.uint8, device=device).untyped_storage()


@contextmanager
def _as_unsupported() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    # AssertionError and ImportError occur if torch is built without a kind of device
    except (RuntimeError, ValueError, TypeError, OverflowError, IndexError, AssertionError, ImportError) as error:
        if "allocate memory" in str(error):
            raise
        raise Unsupported(f"an argument cannot be created: {one_line(error)}") from error
