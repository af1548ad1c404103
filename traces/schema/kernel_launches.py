"""Launches of Triton kernels as signatures hold them: what they are launched with beside their arguments.

A launch is a call of kind `extension` named `module:kernel`. Its positional arguments are those that the kernel takes
when it runs, in the order of its parameters; its keyword arguments are `grid`, `constants` (by parameter) and `options`
of the compiler, such as `num_warps`. A constant that is a type of Triton stands there as torch's dtype, another kernel
as a `NamedSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from opgrip.traces.schema.records import EXTENSION, Signature
from opgrip.traces.schema.torch_names import plain_name

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
