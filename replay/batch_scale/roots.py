"""Where the batch comes into a trace: the tensors that operators of networks take one image, one sentence of a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from opgrip.replay.cases.flow import FlowingCall
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.traces.schema.arguments import TensorSpec, tensors
from opgrip.traces.schema.records import NO_STORAGE, OPERATOR, Signature

IMAGES = {
    "aten.convolution.default": 0,
    "aten.native_batch_norm.default": 0,
    "aten.cudnn_batch_norm.default": 0,
    "aten.miopen_batch_norm.default": 0,
    "aten._native_batch_norm_legit.default": 0,
    "aten._batch_norm_with_update.default": 0,
}
"""Operators whose data has the batch in its first dimension, and which of their tensors that is."""
WORDS = {"aten.embedding.default": 1}
"""Those whose data may be of the batch or, as positions are, the same for all of it."""
ROWS = {
    "aten.addmm.default": 1,
    "aten.mm.default": 0,
    "aten.linear.default": 0,
    "aten.bmm.default": 0,
    "aten.native_layer_norm.default": 0,
}
"""Those whose data has the batch in its first dimension, alone or multiplied by others."""
ANCHORS = {**IMAGES, **WORDS, **ROWS}

_PARAMETERS = frozenset({"weight", "bias", "running_mean", "running_var"})


@dataclass(frozen=True, slots=True)
class Phased:
    """A call and the phase it was in."""

    call: FlowingCall
    phase: str


def parameters(calls: list[Phased], signatures: Mapping[int, Signature]) -> tuple[set[int], set[int]]:
    """The memory that was there before the calls, and that of it which holds parameters."""
    result_memory: set[int] = set()
    outside: set[int] = set()
    trained: set[int] = set()
    learning: set[int] = set()
    data: set[int] = set()
    roles = {number: list(_roles(signature)) for number, signature in signatures.items()}
    for phased in calls:
        call, forward = phased.call, phased.phase == "forward"
        outside.update(number for number in call.takes if number not in result_memory and number != NO_STORAGE)
        result_memory.update(number for number in call.gives if number not in outside)
        if phased.phase == "optimizer":
            trained.update(call.takes)
            continue
        if forward and call.op in ANCHORS:
            data.add(call.takes[ANCHORS[call.op]])
        for number, (spec, name) in zip(call.takes, roles.get(call.signature, ()), strict=False):
            if name in _PARAMETERS or (name == "mat2" and forward):
                trained.add(number)
            elif spec.requires_grad:
                learning.add(number)
    # what a network takes as its data may require a gradient too
    return outside, (trained | learning - data) & outside


def _roles(signature: Signature) -> Iterator[tuple[TensorSpec, str]]:
    """Each tensor that a call takes, and the name of the argument that it is of."""
    names: list[str] = []
    if signature.kind == OPERATOR:
        try:
            names = [argument.name for argument in find_operator(signature).function._schema.arguments]  # type: ignore[attr-defined]
        except Unsupported:
            names = []
    names += [""] * (len(signature.args) - len(names))
    for name, value in (*zip(names, signature.args, strict=False), *signature.kwargs.items()):
        for spec in tensors(value):
            yield spec, name
