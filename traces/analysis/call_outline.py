"""A call and its arguments in one line."""

from __future__ import annotations

from itertools import islice
from typing import Any

from opgrip.errors import shortened
from opgrip.traces.schema.arguments import GeneratorSpec, Opaque, TensorSpec, leaves
from opgrip.traces.schema.python_objects import children
from opgrip.traces.schema.records import Signature
from opgrip.traces.schema.tensor_specs import tensor_outline

MOST = 400
"""Characters of a call's arguments."""
MOST_LEAVES = 60
"""Arguments of a call that are written one by one."""


def outline(value: Any) -> str:
    """Arguments in short: `(float32[2,3], 1, [2, 2])`."""
    many = sum(1 for _ in islice(leaves(value), MOST_LEAVES + 1)) > MOST_LEAVES
    return shortened(_short(value) if not many else _first_leaves(value), MOST)


def _first_leaves(value: Any) -> str:
    return f"{', '.join(map(_short, islice(leaves(value), MOST_LEAVES)))}, ..."


def _short(value: Any) -> str:
    match value:
        case TensorSpec():
            return tensor_outline(value.dtype, value.shape)
        case Opaque(name):
            return f"<{name}>"
        case GeneratorSpec(device):
            return f"generator of {device}"
        case str():
            return repr(value)
        case list():
            return f"[{', '.join(map(_short, value))}]"
        case tuple():
            return f"({', '.join(map(_short, value))})"
        case dict():
            return f"{{{', '.join(f'{_short(key)}: {_short(item)}' for key, item in value.items())}}}"
    inner = children(value)
    return str(value) if inner is None else f"{type(value).__name__}({', '.join(map(_short, inner))})"


def call_outline(signature: Signature) -> str:
    """A signature in short: `aten.mul.Tensor(float32[2,3], 2.5)`."""
    words = [f"{name}={outline(value)}" for name, value in signature.kwargs.items()]
    return f"{signature.op}({shortened(', '.join([*map(outline, signature.args), *words]), MOST)})"
