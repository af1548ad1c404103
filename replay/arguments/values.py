"""Ways to draw the values of arguments: as recorded, or as tools do that know their shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from opgrip.traces import Trace
    from opgrip.traces.records import Signature
    from opgrip.traces.values import Drawable, ValueModel

RECORDED, RANDOM, ZEROS = "recorded", "random", "zeros"
KINDS = (RECORDED, RANDOM, ZEROS)


@dataclass(frozen=True, slots=True)
class Random:
    """Normal floats, evenly many true and false, integers of 0 and 1, which index anything of two elements."""

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """Values that know nothing of the recorded ones."""
        import torch

        from opgrip.replay.arguments.filling import normal

        if dtype.is_floating_point or dtype.is_complex:
            return normal(shape, dtype, generator)
        return torch.randint(0, 2, shape, generator=generator, device=generator.device).to(dtype)


@dataclass(frozen=True, slots=True)
class Zeros:
    """Zeros throughout."""

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """Zeros."""
        import torch

        return torch.zeros(shape, dtype=dtype, device=generator.device)


_MODELS: Mapping[str, Drawable] = {RANDOM: Random(), ZEROS: Zeros()}


def with_values(
    signature: Signature, values: Mapping[int, Drawable], kind: str
) -> tuple[Signature, Mapping[int, Drawable]]:
    """A signature whose tensors draw their values in this way, and the models that they refer to.

    Where nothing is recorded of an argument, its values are what its operator takes, as far as that is known.
    """
    from opgrip.traces.arguments import TensorSpec, map_leaves
    from opgrip.traces.tensor_specs import map_values

    if kind == RECORDED:
        return with_defaults(signature, values)

    def refer(leaf: object) -> object:
        return map_values(lambda number: 0, leaf) if isinstance(leaf, TensorSpec) else leaf

    changed = replace(signature, args=map_leaves(refer, signature.args), kwargs=map_leaves(refer, signature.kwargs))
    return changed, {0: _MODELS[kind]}


def with_defaults(signature: Signature, values: Mapping[int, Drawable]) -> tuple[Signature, Mapping[int, Drawable]]:
    """A signature whose tensors without values refer to models of what its operator takes, and all models."""
    signature, models = _fill(signature, -1)
    return signature, {**values, **models} if models else values


def trace_with_defaults(trace: Trace) -> Trace:
    """A trace whose signatures are such."""
    signatures: list[Signature] = []
    models: dict[int, ValueModel] = {}
    for signature in trace.signatures:
        filled, own = _fill(signature, -1 - len(models))
        signatures.append(filled)
        models |= own
    return replace(trace, signatures=signatures, values={**trace.values, **models}) if models else trace


def _fill(signature: Signature, first: int) -> tuple[Signature, dict[int, ValueModel]]:
    from opgrip.traces.records import OPERATOR
    from opgrip.traces.values.defaults import default_values

    if signature.kind != OPERATOR:
        return signature, {}
    args, kwargs, models = default_values(signature.op, signature.args, signature.kwargs, signature.outputs, first)
    return (replace(signature, args=args, kwargs=kwargs), models) if models else (signature, {})
