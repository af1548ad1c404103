"""Arguments of operators: schemas, tensors of a signature, arguments that a call writes into, Triton kernel launches.

A launch of a Triton kernel is a call of kind `extension` with the name `module:kernel`. Its positional arguments are
the kernel's runtime arguments; its keyword arguments are `grid`, `constants` (by parameter) and `options` of the
compiler, such as `num_warps`. A constant that is a Triton type is represented by torch's dtype, and another kernel by a
`NamedSpec`.
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

# names of the keyword arguments of a kernel launch
GRID, CONSTANTS, OPTIONS = LAUNCH = ("grid", "constants", "options")
# names of Triton's types by the dtypes that represent them in constants
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
MOST_DIMENSIONS = 3
LARGEST = (1 << 31) - 1  # CUDA's maximum size of a grid in one dimension


def launch_keywords(grid: tuple[int, ...], constants: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {GRID: grid, CONSTANTS: dict(constants), OPTIONS: dict(options)}


def launch_facts(signature: Signature) -> dict[str, Any]:
    kwargs = signature.kwargs
    return {GRID: kwargs[GRID], **kwargs[CONSTANTS], **kwargs[OPTIONS]}


def is_launch(signature: Signature) -> bool:
    kwargs = signature.kwargs
    if signature.kind != EXTENSION or tuple(kwargs) != LAUNCH:
        return False
    return isinstance(kwargs[CONSTANTS], dict) and isinstance(kwargs[OPTIONS], dict)


@dataclass(frozen=True, slots=True)
class Interface:
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    opaque: bool = False

    def memory_of(self, mentioned: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Split the storages of a call's tensors into those of its arguments and those of its results."""
        argument_count = len(self.inputs)
        inputs = mentioned[:argument_count] + (NO_STORAGE,) * (argument_count - len(mentioned))
        outputs = mentioned[argument_count:]
        if self.opaque:
            # arguments that a trace cannot hold have storages, too
            outputs = outputs[max(0, len(outputs) - len(self.outputs)) :]
        return inputs, outputs


def interface_of(signature: Signature) -> Interface:
    results = tuple(leaf for leaf in leaves(signature.outputs) if isinstance(leaf, TensorSpec))
    arguments = [signature.args, signature.kwargs]
    return Interface(tuple(tensors(arguments)), results, any(isinstance(leaf, Opaque) for leaf in leaves(arguments)))


@lru_cache(maxsize=8192)
def schema_arguments(op: str) -> tuple[tuple[str, str], ...]:
    schema = schema_named(op)
    return () if schema is None else tuple((argument.name, str(argument.type)) for argument in schema.arguments)


def schema_of(signature: Signature) -> Any:
    return schema_named(signature.op) if signature.kind == OPERATOR else None


def schema_named(op: str) -> Any:
    namespace, _, rest = op.partition(".")
    packet, _, overload = rest.partition(".")
    # torch does not accept every string that a file may contain
    if not op.isascii() or not packet.isidentifier() or not namespace.isidentifier():
        return None
    schemas = torch._C._jit_get_schemas_for_operator(f"{namespace}::{packet}")
    return next((schema for schema in schemas if (schema.overload_name or "default") == overload), None)


def written(signature: Signature) -> list[bool]:
    """Return, for each tensor in the arguments of a signature, True if its calls may write into it."""
    places = _written_places(signature)
    arguments = [*enumerate(signature.args), *signature.kwargs.items()]
    return [place in places for place, value in arguments for _ in tensors(value)]


def _written_places(signature: Signature) -> set[int | str]:
    everything: set[int | str] = {*range(len(signature.args)), *signature.kwargs}
    schema = schema_of(signature)
    if schema is None:
        return everything
    arguments = list(enumerate(schema.arguments))
    pairs = [(index, item.name) for index, item in arguments if item.alias_info and item.alias_info.is_write]
    return {place for pair in pairs for place in pair}
