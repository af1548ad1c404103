"""Ways to draw the values of arguments: as recorded, or as tools do that know their shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from opgrip.traces.arguments import TensorSpec, map_leaves
from opgrip.traces.records import Signature
from opgrip.traces.tensor_specs import map_values
from opgrip.traces.values import Drawable

RECORDED, RANDOM, ZEROS = "recorded", "random", "zeros"
KINDS = (RECORDED, RANDOM, ZEROS)


@dataclass(frozen=True, slots=True)
class Random:
    """Normal floats, evenly many true and false, integers of 0 and 1, which index anything of two elements."""

    priority: ClassVar[int] = 0

    def check(self) -> None:
        """Nothing to check."""

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """Values that know nothing of the recorded ones."""
        device = generator.device
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex64 if dtype.is_complex else torch.float32
            return torch.randn(shape, dtype=wide, generator=generator, device=device).to(dtype)
        return torch.randint(0, 2, shape, generator=generator, device=device).to(dtype)


@dataclass(frozen=True, slots=True)
class Zeros:
    """Zeros throughout."""

    priority: ClassVar[int] = 0

    def check(self) -> None:
        """Nothing to check."""

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """Zeros."""
        return torch.zeros(shape, dtype=dtype, device=generator.device)


_MODELS: Mapping[str, Callable[[], object]] = {RANDOM: Random, ZEROS: Zeros}


def with_values(
    signature: Signature, values: Mapping[int, Drawable], kind: str
) -> tuple[Signature, Mapping[int, Drawable]]:
    """A signature whose tensors draw their values in this way, and the models that they refer to."""
    if kind == RECORDED:
        return signature, values

    def refer(leaf: object) -> object:
        return map_values(lambda number: 0, leaf) if isinstance(leaf, TensorSpec) else leaf

    changed = replace(signature, args=map_leaves(refer, signature.args), kwargs=map_leaves(refer, signature.kwargs))
    return changed, {0: _MODELS[kind]()}  # type: ignore[dict-item]
