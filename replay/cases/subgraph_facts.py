"""Facts about recorded calls as parts of a subgraph: tensors, settings, and why a subgraph cannot contain a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from opgrip.replay.inputs.filling import CAST
from opgrip.replay.operators.lookup import Unsupported, find_operator, sizes_vary
from opgrip.traces.schema.arguments import GeneratorSpec, GroupSpec, Opaque, ReductionSpec, TensorSpec, leaves
from opgrip.traces.schema.operator_arguments import Interface, interface_of, written
from opgrip.traces.schema.python_objects import NamedSpec, ObjectSpec
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.schema.tensor_specs import STORAGE


@dataclass(frozen=True, slots=True)
class Facts:
    """A signature, and properties derived from it.

    writes : for each tensor argument, True if a call may write into it
    settings : arguments that depend on the device or dtype of the replay (see `is_setting`)
    varies : True if the sizes of results depend on input values
    refusal : reason why a subgraph cannot contain such calls; None if the signature shows none
    """

    signature: Signature
    interface: Interface
    writes: tuple[bool, ...]
    settings: tuple[Any, ...]
    varies: bool
    refusal: str | None

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.interface.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.interface.outputs


def facts_of(signature: Signature) -> Facts:
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
    """Return True if an argument, or a value in a nested argument, depends on the device or dtype of the replay."""
    return isinstance(leaf, torch.device | GeneratorSpec) or (isinstance(leaf, torch.dtype) and leaf in CAST)


def _refusal(signature: Signature, argument_leaves: list[object]) -> str | None:
    if signature.raised is not None:
        return f"{signature.op} raised when it was captured: {signature.raised}"
    if any(isinstance(value, ObjectSpec) for value in (*signature.args, *signature.kwargs.values())):
        return f"{signature.op} takes packed parameters, which a graph cannot hold"
    for leaf in argument_leaves:
        if isinstance(leaf, TensorSpec) and leaf.cls == STORAGE:
            return f"{signature.op} takes a storage, which a graph cannot hold"
        if isinstance(leaf, Opaque):
            return f"a trace cannot hold an argument of {signature.op}, of type {leaf.type_name}"
        if isinstance(leaf, NamedSpec):
            return f"{signature.op} takes {leaf.name}, which a graph cannot hold"
        if isinstance(leaf, GroupSpec | ReductionSpec):
            return f"{signature.op} takes a process group, which a replay does not have"
    return None


def _sizes_vary(signature: Signature) -> bool:
    if signature.kind != OPERATOR:
        return True
    try:
        return sizes_vary(find_operator(signature).function)
    except Unsupported:
        return False
