"""A signature's arguments in one line, for people."""

from __future__ import annotations

import json
from typing import Any

import torch

from opgrip.traces.schema.arguments import TensorSpec, encode
from opgrip.traces.schema.records import Signature
from opgrip.traces.schema.torch_names import plain_name, tensor_outline

MOST_OUTLINE = 1000
"""Characters of the arguments of a call."""


def outline(signature: Signature) -> str:
    """A call's arguments in short: `float32[2,3], 1, alpha=2`."""
    named = (f"{name}={_outline(value)}" for name, value in signature.kwargs.items())
    text = ", ".join([*map(_outline, signature.args), *named])
    return text if len(text) <= MOST_OUTLINE else f"{text[: MOST_OUTLINE - 1]}…"


def _outline(value: Any) -> str:
    match value:
        case TensorSpec():
            return tensor_outline(value.dtype, value.shape)
        case list() | tuple():
            return f"[{', '.join(map(_outline, value))}]"
        case None | bool() | int() | float() | str():
            return repr(value)
        case torch.dtype() | torch.layout() | torch.memory_format() | torch.device():
            return plain_name(value)
    return json.dumps(encode(value))
