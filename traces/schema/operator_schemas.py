"""What torch says of the arguments of operators."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=8192)
def schema_arguments(op: str) -> tuple[tuple[str, str], ...]:
    """Names and types of an operator's arguments; none where this torch does not have it."""
    namespace, _, rest = op.partition(".")
    packet, _, overload = rest.partition(".")
    # torch cannot be asked for every text that a file may hold
    if not op.isascii() or not packet.isidentifier() or not namespace.isidentifier():
        return ()
    for schema in torch._C._jit_get_schemas_for_operator(f"{namespace}::{packet}"):
        if (schema.overload_name or "default") == overload:
            return tuple((argument.name, str(argument.type)) for argument in schema.arguments)
    return ()
