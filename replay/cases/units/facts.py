"""What is asked of a signature again and again, for each unit that has calls of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from opgrip.replay.cases.traits import sizes_vary
from opgrip.replay.inputs.filling import CAST
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.traces.schema.arguments import GeneratorSpec, GroupSpec, Opaque, ReductionSpec, TensorSpec, leaves
from opgrip.traces.schema.mutated_arguments import Interface, interface_of, written
from opgrip.traces.schema.python_objects import NamedSpec
from opgrip.traces.schema.records import OPERATOR, Signature


@dataclass(frozen=True, slots=True)
class Facts:
    """A signature, and what follows from it.

    Attributes
    ----------
    writes : whether its calls may write into each of the tensors that they take
    settings : see `is_setting`
    varies : whether what its calls give has a size that depends on values
    refusal : why its calls cannot run, as far as that is told without looking their operator up
    """

    signature: Signature
    interface: Interface
    writes: tuple[bool, ...]
    settings: tuple[Any, ...]
    varies: bool
    refusal: str | None

    @property
    def takes(self) -> tuple[TensorSpec, ...]:
        """The tensors among its arguments."""
        return self.interface.takes

    @property
    def gives(self) -> tuple[TensorSpec, ...]:
        """The tensors among its first call's results."""
        return self.interface.gives


def facts_of(signature: Signature) -> Facts:
    """What follows from a signature."""
    argument_leaves = list(leaves([signature.args, signature.kwargs]))
    return Facts(
        signature,
        interface_of(signature),
        tuple(written(signature)),
        tuple(filter(is_setting, argument_leaves)),
        _sizes_vary(signature),
        _refusal(signature, argument_leaves),
    )


def is_setting(leaf: object) -> bool:
    """Whether an argument depends on where and in what a call is replayed."""
    return isinstance(leaf, torch.device | GeneratorSpec) or (isinstance(leaf, torch.dtype) and leaf in CAST)


def _refusal(signature: Signature, argument_leaves: list[object]) -> str | None:
    if signature.raised is not None:
        return f"{signature.op} raised when it was captured: {signature.raised}"
    for leaf in argument_leaves:
        if isinstance(leaf, Opaque):
            return f"a trace cannot hold an argument of {signature.op}, of type {leaf.type_name}"
        if isinstance(leaf, NamedSpec):
            return f"{signature.op} takes {leaf.name}, which a graph cannot hold"
        if isinstance(leaf, GroupSpec | ReductionSpec):
            return f"{signature.op} takes a process group, which a replay has none of"
    return None


def _sizes_vary(signature: Signature) -> bool:
    if signature.kind != OPERATOR:
        return True
    try:
        return sizes_vary(find_operator(signature).function)
    except Unsupported:
        return False
