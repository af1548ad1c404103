"""Arguments of operators: schemas, tensors of a signature, arguments that are written, launches of Triton kernels.

A launch is a call of kind `extension` named `module:kernel`. Its positional arguments are those that the kernel
takes when it runs, in the order of its parameters; its keyword arguments are `grid`, `constants` (by parameter) and
`options` of the compiler, such as `num_warps`. A constant that is a type of Triton stands there as torch's dtype,
another kernel as a `NamedSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from opgrip.traces.schema.arguments import Opaque, TensorSpec, leaves, tensors
from opgrip.traces.schema.records import EXTENSION, NO_STORAGE, OPERATOR, Signature
from opgrip.traces.schema.tensor_specs import plain_name

GRID, CONSTANTS, OPTIONS = LAUNCH = ("grid", "constants", "options")
"""Keyword arguments of a launch."""
TYPES: dict[torch.dtype, str] = {
    torch.bool: "int1",
    torch.float8_e4m3fn: "float8e4nv",
    torch.float8_e4m3fnuz: "float8e4b8",
    torch.float8_e5m2: "float8e5",
    torch.float8_e5m2fnuz: "float8e5b16",
    **{
        dtype: plain_name(dtype)
        for dtype in (
            *(torch.int8, torch.int16, torch.int32, torch.int64),
            *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
            *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        )
    },
}
"""The names that Triton's language has its types by, each by the dtype that stands for it among the constants."""
MOST_DIMENSIONS = 3
LARGEST = (1 << 31) - 1
"""Of a grid's sizes, by CUDA."""


def launch_keywords(grid: tuple[int, ...], constants: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a launch."""
    return {GRID: grid, CONSTANTS: dict(constants), OPTIONS: dict(options)}


def launch_facts(signature: Signature) -> dict[str, Any]:
    """Grid, constants and options of a launch by their names, as they are told of it."""
    kwargs = signature.kwargs
    return {GRID: kwargs[GRID], **kwargs[CONSTANTS], **kwargs[OPTIONS]}


def is_launch(signature: Signature) -> bool:
    """Whether a signature is of launches."""
    kwargs = signature.kwargs
    if signature.kind != EXTENSION or tuple(kwargs) != LAUNCH:
        return False
    return isinstance(kwargs[CONSTANTS], dict) and isinstance(kwargs[OPTIONS], dict)


@dataclass(frozen=True, slots=True)
class Interface:
    """The tensors of a signature.

    Attributes
    ----------
    takes : those of its arguments, in their order; `gives` those of its first call's results
    opaque : whether some of its arguments are of a kind that a trace cannot hold
    """

    takes: tuple[TensorSpec, ...]
    gives: tuple[TensorSpec, ...]
    opaque: bool = False

    def memory_of(self, mentioned: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the memory that a call mentions, that of each tensor that it takes, and that of those that it gives."""
        argument_count = len(self.takes)
        takes = mentioned[:argument_count] + (NO_STORAGE,) * (argument_count - len(mentioned))
        gives = mentioned[argument_count:]
        if self.opaque:
            # arguments that a trace cannot hold have numbers too
            gives = gives[max(0, len(gives) - len(self.gives)) :]
        return takes, gives


def interface_of(signature: Signature) -> Interface:
    """The tensors of a signature."""
    results = tuple(leaf for leaf in leaves(signature.outputs) if isinstance(leaf, TensorSpec))
    arguments = [signature.args, signature.kwargs]
    return Interface(tuple(tensors(arguments)), results, any(isinstance(leaf, Opaque) for leaf in leaves(arguments)))


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
