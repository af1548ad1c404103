"""Regenerates the arguments of a call: the recorded metadata, and values that its models draw."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from opgrip.replay.operators import Unsupported
from opgrip.traces.arguments import (
    GeneratorSpec,
    GroupSpec,
    Opaque,
    ReductionSpec,
    TensorSpec,
    leaves,
    map_leaves,
    tensors,
)
from opgrip.traces.values import Drawable

DeviceMap = Callable[[str], str]


def device_map(recorded: str, wanted: str | None) -> DeviceMap:
    """Where tensors go that were recorded elsewhere.

    Parameters
    ----------
    recorded : the device that the program ran on
    wanted : the one to replay on; None for the recorded one

    What a program on an accelerator keeps on the CPU stays there.
    """
    if wanted is None:
        return lambda device: device
    kind = recorded.partition(":")[0]
    return lambda device: wanted if wanted == "cpu" or device.partition(":")[0] == kind else device


@dataclass(frozen=True, slots=True)
class _Planned:
    """A tensor to make: where in which storage."""

    spec: TensorSpec
    storage: int


class Inputs:
    """The arguments of one case, which can be had in their first state again and again.

    Parameters
    ----------
    args, kwargs : trees of values and `TensorSpec`, as a signature holds them
    values : the value models that they refer to
    place : where tensors go
    seed : of the values that are drawn

    Raises
    ------
    Unsupported : for arguments that cannot be made
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        values: Mapping[int, Drawable],
        place: DeviceMap,
        seed: int,
    ) -> None:
        self._place = place
        self._storages: list[torch.UntypedStorage] = []
        self._pristine: list[torch.UntypedStorage] = []
        self._args, self._kwargs = args, dict(kwargs)
        plan = self._plan(list(tensors([args, self._kwargs])))
        self._planned = plan
        generators: dict[str, torch.Generator] = {}
        for planned in plan:
            device = place(planned.spec.device)
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            _fill(self._view(planned), _draw(planned.spec, values, generators[device]))

    @property
    def nbytes(self) -> int:
        """Bytes of all storages."""
        return sum(storage.nbytes() for storage in self._storages)

    def copy(self) -> Inputs:
        """The same arguments in memory of their own, kept as they are."""
        twin = copy.copy(self)
        twin._storages = [storage.clone() for storage in self._pristine or self._storages]
        twin.keep()
        return twin

    def make(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and named arguments: fresh tensor objects over the same memory."""
        plan = iter(self._planned)

        def build(leaf: Any) -> Any:
            if isinstance(leaf, TensorSpec):
                return self._finished(next(plan))
            if isinstance(leaf, GeneratorSpec):
                return torch.Generator(self._place(leaf.device)).manual_seed(leaf.seed)
            if isinstance(leaf, torch.device):
                return torch.device(self._place(str(leaf)))
            return leaf

        return map_leaves(build, self._args), map_leaves(build, self._kwargs)

    def keep(self) -> None:
        """Remember the values as they are, for `restore`."""
        self._pristine = [storage.clone() for storage in self._storages]

    def restore(self) -> None:
        """Put back the values of the last `keep`, whatever the operator did to them."""
        for storage, pristine in zip(self._storages, self._pristine, strict=True):
            if storage.nbytes() != pristine.nbytes():
                storage.resize_(pristine.nbytes())
            storage.copy_(pristine)

    def _plan(self, specs: list[TensorSpec]) -> list[_Planned]:
        for leaf in (leaf for tree in (self._args, self._kwargs) for leaf in _opaque(tree)):
            raise Unsupported(f"a trace cannot hold an argument of type {leaf.type_name}")
        if any(isinstance(leaf, GroupSpec | ReductionSpec) for leaf in leaves([self._args, self._kwargs])):
            raise Unsupported("it takes a process group, which a replay has none of")
        groups: dict[Any, list[TensorSpec]] = {}
        for index, spec in enumerate(specs):
            _check_supported(spec)
            groups.setdefault(("own", index) if spec.storage is None else spec.storage, []).append(spec)
        number = {key: index for index, key in enumerate(groups)}
        for members in groups.values():
            size = max(spec.extent for spec in members)
            self._storages.append(_zeros(size, self._place(members[0].device)))
        return [
            _Planned(spec, number[("own", index) if spec.storage is None else spec.storage])
            for index, spec in enumerate(specs)
        ]

    def _view(self, planned: _Planned) -> torch.Tensor:
        spec, storage = planned.spec, self._storages[planned.storage]
        empty = torch.empty(0, dtype=spec.dtype, device=storage.device)
        assert spec.stride is not None, "checked when the tensors were planned"
        return empty.set_(storage, spec.offset, spec.shape, spec.stride)

    def _finished(self, planned: _Planned) -> torch.Tensor:
        tensor, spec = self._view(planned), planned.spec
        if spec.conj:
            tensor = tensor.conj()
        if spec.neg:
            tensor = torch._neg_view(tensor)
        return tensor.requires_grad_(spec.requires_grad) if spec.requires_grad else tensor


def _opaque(tree: Any) -> list[Opaque]:
    found: list[Opaque] = []
    map_leaves(lambda leaf: found.append(leaf) if isinstance(leaf, Opaque) else None, tree)
    return found


def _check_supported(spec: TensorSpec) -> None:
    if spec.cls is not None:
        raise Unsupported(f"an argument is a {spec.cls}, not a plain tensor")
    if spec.device == "meta":
        raise Unsupported("an argument is on the meta device, which does no work")
    if spec.layout is not torch.strided or spec.stride is None:
        raise Unsupported(f"an argument has the layout {str(spec.layout).removeprefix('torch.')}")
    if str(spec.dtype).startswith(("torch.q", "torch.bits")):
        raise Unsupported(f"an argument has the dtype {str(spec.dtype).removeprefix('torch.')}")


def _zeros(size: int, device: str) -> torch.UntypedStorage:
    return torch.zeros(size, dtype=torch.uint8, device=device).untyped_storage()


def _draw(spec: TensorSpec, values: Mapping[int, Drawable], generator: torch.Generator) -> torch.Tensor:
    model = None if spec.values is None else values.get(spec.values)
    if model is not None and 0 not in spec.shape:
        return model.draw(spec.shape, spec.dtype, generator)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        wide = torch.complex64 if spec.dtype.is_complex else torch.float32
        return torch.randn(spec.shape, dtype=wide, generator=generator, device=generator.device).to(spec.dtype)
    # zero is a valid index into anything that is not empty
    return torch.zeros(spec.shape, dtype=spec.dtype, device=generator.device)


def _fill(tensor: torch.Tensor, drawn: torch.Tensor) -> None:
    """Write values into a tensor whose elements may share memory with each other."""
    for dimension, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dimension] > 1:
            tensor, drawn = tensor.narrow(dimension, 0, 1), drawn.narrow(dimension, 0, 1)
    try:
        tensor.copy_(drawn)
    except RuntimeError:
        # windows that overlap, as unfold makes them: any values of the right kind will do
        span = _extent_of(tensor)
        flat = drawn.reshape(-1)
        flat = flat.repeat(-(-span // flat.numel()))[:span]
        tensor.as_strided((span,), (1,)).copy_(flat)


def _extent_of(tensor: torch.Tensor) -> int:
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
