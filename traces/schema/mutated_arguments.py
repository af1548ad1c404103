"""Which arguments a call writes into, by what torch says of its operator."""

from __future__ import annotations

from typing import Any

import torch

from opgrip.traces.schema.arguments import tensors
from opgrip.traces.schema.records import OPERATOR, Signature


def written(signature: Signature) -> list[bool]:
    """Whether a call may write into each of the tensors among its arguments, in their order."""
    places = _written_places(signature)
    arguments = [*enumerate(signature.args), *signature.kwargs.items()]
    return [place in places for place, value in arguments for _ in tensors(value)]


def _written_places(signature: Signature) -> set[int | str]:
    """The places of the arguments that a call may write into."""
    everything: set[int | str] = {*range(len(signature.args)), *signature.kwargs}
    schema = schema_of(signature)
    if schema is None:
        return everything
    arguments = list(enumerate(schema.arguments))
    pairs = [(index, item.name) for index, item in arguments if item.alias_info and item.alias_info.is_write]
    return {place for pair in pairs for place in pair}


def schema_of(signature: Signature) -> Any:
    """What torch says of a signature's operator; None where it knows none of that name."""
    if signature.kind != OPERATOR or not signature.op.isascii():
        # torch cannot be asked for every text that a file may hold
        return None
    namespace, _, rest = signature.op.partition(".")
    name, _, overload = rest.rpartition(".")
    schema: Any = None
    for candidate in torch._C._jit_get_schemas_for_operator(f"{namespace}::{name}"):
        if candidate.overload_name == ("" if overload == "default" else overload):
            schema = candidate
    return schema
