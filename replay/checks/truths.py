"""Runs of the reference: with the recorded dtypes, in float64, and in float64 with slightly changed arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opgrip.replay.inputs.filling import CAST
from opgrip.replay.modes import RunOutputs
from opgrip.replay.operators.contexts import EPS, ROUNDED, OperatorNames, may_use_tf32, takes_float32
from opgrip.replay.operators.devices import module_of
from opgrip.replay.operators.memory import Arguments
from opgrip.traces.schema.arguments import leaves, map_leaves


def observe(function: Callable[..., Any], arguments: Arguments, mutates: bool) -> RunOutputs:
    """Run a call and return copies of its results and, if `mutates` is True, of its argument tensors after the run."""
    args, kwargs = arguments
    outputs = [_copy_leaf(leaf) for leaf in leaves(function(*args, **kwargs))]
    return RunOutputs(outputs, [_copy_leaf(tensor) for tensor in tensors_of(arguments)] if mutates else [])


def tensors_of(arguments: Arguments) -> list[Tensor]:
    return [leaf for leaf in leaves(list(arguments)) if isinstance(leaf, Tensor)]


def run_seeded(function: Callable[..., Any], arguments: Arguments, mutates: bool, seed: int) -> RunOutputs:
    """Run a call with all random generators seeded, and restore the program's generators afterwards."""
    with _seeded(arguments, seed):
        return observe(function, arguments, mutates)


def _copy_leaf(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


@contextmanager
def _seeded(arguments: Arguments, seed: int) -> Iterator[None]:
    used = {tensor.device for tensor in tensors_of(arguments) if tensor.device.type != "cpu"}
    kinds = {device.type for device in used}
    if torch.cuda.is_initialized():
        kinds.add("cuda")
    for leaf in leaves(list(arguments)):
        if isinstance(leaf, torch.Generator):
            leaf.manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        devices = [f"{kind}:{index}" for kind in kinds for index in range(getattr(torch, kind).device_count())]
        states = {device: module_of(device).get_rng_state(device) for device in devices}
        try:
            # torch.manual_seed would also seed accelerators that are not used here
            torch.default_generator.manual_seed(seed)
            for kind in kinds:
                getattr(torch, kind).manual_seed_all(seed)
            yield
        finally:
            for device, state in states.items():
                module_of(device).set_rng_state(state, device)


DISTURBED = 4  # number of runs with arguments that differ in their last bit: all greater, all less, and at random

_ALIKE = (1, -1)
_COMPLEX = frozenset({torch.complex32, torch.complex64})


@dataclass(frozen=True, slots=True)
class Truths:
    """Results of a call computed in float64.

    exact : results for the exact arguments
    disturbed : results for arguments changed by half an epsilon of their dtype, which show the effect of rounding
    tf32 : True if TF32's epsilon was used for float32
    """

    exact: RunOutputs
    disturbed: tuple[RunOutputs, ...]
    tf32: bool = False

    @property
    def all(self) -> tuple[RunOutputs, ...]:
        return (self.exact, *self.disturbed)


def truths_of(
    function: Callable[..., Any], make_arguments: Callable[[], Arguments], mutates: bool, seed: int
) -> Truths | None:
    """Return the results of a call computed in float64; None if it cannot run in float64.

    Arguments that share memory must not be written, because their float64 copies share none.
    """
    first = make_arguments()
    if mutates and _share_memory(tensors_of(first)):
        # copies in another dtype no longer share memory
        return None
    mode = _InFloat64()
    exact = _attempted(function, _raised(first), mutates, seed, mode)
    if exact is None:
        return None
    # compiled code may use TF32 where eager did not
    tf32 = takes_float32(tensors_of(first)) and may_use_tf32(mode.names)
    disturbed = [
        _attempted(function, _raised(make_arguments(), number, tf32), mutates, seed, _InFloat64())
        for number in range(DISTURBED)
    ]
    return Truths(exact, tuple(run for run in disturbed if run is not None), tf32)


class _InFloat64(OperatorNames):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raised = map_leaves(_raise_dtype, tuple(args)), map_leaves(_raise_dtype, kwargs or {})
        return OperatorNames.__torch_dispatch__(self, func, types, *raised)


def _attempted(
    function: Callable[..., Any], arguments: Arguments, mutates: bool, seed: int, mode: _InFloat64
) -> RunOutputs | None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with mode:
            return run_seeded(function, arguments, mutates, seed)
    except Exception:
        return None
    finally:
        torch.set_default_dtype(before)


def _raise_dtype(leaf: Any) -> Any:
    if not isinstance(leaf, torch.dtype):
        return leaf
    if leaf in CAST:
        return torch.float64
    return torch.complex128 if leaf in _COMPLEX else leaf


def _raised(arguments: Arguments, disturbance: int | None = None, tf32: bool = False) -> Arguments:
    generator = torch.Generator().manual_seed(disturbance or 0)

    def raised(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return _raise_dtype(leaf)
        if leaf.dtype not in CAST | _COMPLEX | {torch.complex128}:
            return leaf
        tensor = leaf.detach().to(_raise_dtype(leaf.dtype))
        if disturbance is not None and leaf.layout is torch.strided and not leaf.is_nested:
            half = (EPS if tf32 and leaf.dtype in ROUNDED else torch.finfo(leaf.dtype).eps) / 2
            signs = torch.randint(2, tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
            if disturbance < len(_ALIKE):
                signs = torch.full_like(signs, _ALIKE[disturbance])
            tensor = tensor * (1 + half * signs.to(tensor.device))
        elif tensor is leaf or tensor.data_ptr() == leaf.data_ptr():
            tensor = tensor.clone()
        return tensor.requires_grad_(leaf.requires_grad)

    args, kwargs = arguments
    return map_leaves(raised, args), map_leaves(raised, kwargs)


def _share_memory(tensors: list[Tensor]) -> bool:
    strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
    return len({tensor.untyped_storage()._cdata for tensor in strided}) < len(strided)
