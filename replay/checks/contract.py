"""Checks of a candidate's results other than of their values: types, strides, shared memory, changed arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opgrip.replay.checks.reference import is_changed
from opgrip.replay.checks.verdicts import ResultVerdict
from opgrip.replay.inputs.inputs import Inputs
from opgrip.replay.operators.memory import Function, tensors_in
from opgrip.traces.schema.arguments import leaves

SEED, OTHER_SEED = 0, 1


@dataclass(frozen=True, slots=True)
class _Run:
    outputs: Sequence[Any]
    arguments: Sequence[Tensor]
    written: frozenset[int]


def check_contract(
    operator: Function, candidate: Function, inputs: Inputs, unused: Collection[int] = ()
) -> ResultVerdict:
    """Return the verdict on everything but the values of a candidate's results, such as strides and written
    arguments.
    """
    expected, actual = _run(operator, inputs, SEED), _run(candidate, inputs, SEED)
    faults = [f"writes into argument {place}" for place in sorted(actual.written - expected.written)]
    for place, (ours, theirs) in enumerate(zip(actual.outputs, expected.outputs, strict=False)):
        if place not in unused and isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            faults += [f"output {place} {reason}" for reason in _output_faults(place, ours, theirs, actual, expected)]
    if not faults and not _differing(expected, _run(operator, inputs, OTHER_SEED)):
        again = _run(candidate, inputs, SEED)
        faults += [
            f"output {place} differs between two runs on the same arguments"
            for place in _differing(actual, again)
            if place not in unused
        ]
    return ResultVerdict(faults=tuple(faults))


def _run(function: Function, inputs: Inputs, seed: int) -> _Run:
    own = inputs.copy()
    args, kwargs = own.make()
    arguments = tensors_in([args, kwargs])
    torch.manual_seed(seed)
    outputs = list(leaves(function(*args, **kwargs)))
    return _Run(outputs, arguments, own.written())


def _output_faults(place: int, ours: Tensor, theirs: Tensor, actual: _Run, expected: _Run) -> Iterator[str]:
    if type(ours) is not type(theirs):
        yield f"is a {type(ours).__name__}, not a {type(theirs).__name__}"
        return
    if ours.layout is not theirs.layout:
        yield f"has the layout {ours.layout}, not {theirs.layout}"
    if torch.strided not in (ours.layout, theirs.layout) or ours.is_nested or theirs.is_nested:
        return
    if ours.shape == theirs.shape and ours.numel() and _strides(ours) != _strides(theirs):
        yield f"has the strides {ours.stride()}, not {theirs.stride()}"
    own, right = _shared(ours, actual.arguments), _shared(theirs, expected.arguments)
    for number in sorted(own.keys() - right.keys()):
        yield f"shares memory with argument {number}, unlike the operator's output"
    for number in sorted(right.keys() - own.keys()):
        yield f"is a copy, but the operator's output shares memory with argument {number}"
    if own.keys() == right.keys() and own != right:
        yield f"starts at element {ours.storage_offset()} of its memory, not {theirs.storage_offset()}"
    before, before_right = (
        set(_shared(run.outputs[place], [item for item in run.outputs[:place] if isinstance(item, Tensor)]))
        for run in (actual, expected)
    )
    if before - before_right and not own:
        yield "shares memory with an earlier output"


def _strides(tensor: Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _shared(output: Tensor, others: Sequence[Tensor]) -> dict[int, int]:
    memory = _memory(output)
    return {
        place: int(output.storage_offset())
        for place, other in enumerate(others)
        if memory is not None and _memory(other) == memory
    }


def _memory(tensor: Any) -> int | None:
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else None


def _differing(one: _Run, other: _Run) -> list[int]:
    return [
        place
        for place, (ours, theirs) in enumerate(zip(one.outputs, other.outputs, strict=False))
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor) and is_changed(ours, theirs)
    ]
