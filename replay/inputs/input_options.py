"""Options for the device and values of a case's inputs, and the kinds of values: recorded, random or zeros."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from opgrip.cli.command import did_you_mean, seed
from opgrip.cli.option_types import floating_dtype
from opgrip.cli.options import CASES, IDENTITY, RUN, option, titled
from opgrip.replay.operators.admission import ALL_OF_TORCH, TRUSTED_EXTENSIONS, extension_of

if TYPE_CHECKING:
    import torch

    from opgrip.traces import Trace
    from opgrip.traces.schema.records import Signature
    from opgrip.traces.values import Drawable, ValueModel
    from opgrip.traces.values.floats import Floats


RECORDED, RANDOM, ZEROS = "recorded", "random", "zeros"
KINDS = (RECORDED, RANDOM, ZEROS)
# kind of values for calls that are run without being measured: recorded values, but large float tensors repeat a piece
REPEATED = "repeated"
PIECE = 1 << 16  # approximate number of elements in a repeated piece
LONG_PIECE = 1 << 20  # approximate number of elements in a repeated piece in measured calls


def value_kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(dict.fromkeys(text.split(",")))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        hint = did_you_mean(unknown[0], KINDS, f"choose from {', '.join(KINDS)}")
        raise argparse.ArgumentTypeError(f"unknown kind of values: {unknown[0]!r}: {hint}")
    return kinds


@titled("device and inputs")
@dataclass(frozen=True, slots=True)
class InputOptions:
    device: str | None = option(
        None,
        "device to replay on, such as cuda:0; cuda:0,cuda:1 spreads the cases over equal devices "
        "(default: where the calls were captured)",
        role=IDENTITY,
        common=True,
    )
    dtype: str | None = option(
        None,
        "dtype to cast floating-point tensors to, such as bfloat16",
        parse=floating_dtype,
        only=("single cases",),
        role=IDENTITY,
        common=True,
    )
    values: tuple[str, ...] = option(
        (RECORDED,),
        "how to generate tensor values: recorded (like the recorded ones), random or zeros; several kinds "
        "are run in turn and compared with the first (default: recorded)",
        parse=value_kinds,
        metavar="KIND,...",
        only=("single cases", "traces"),
        role=IDENTITY,
        common=True,
    )
    seed: int = option(0, "random seed for generated values (default: %(default)s)", parse=seed, role=RUN)
    extension: tuple[str, ...] = option(
        (),
        "module or file to import, whose operators, functions and Triton kernels the trace may call, in addition to "
        f"{', '.join(TRUSTED_EXTENSIONS)}; can be repeated",
        repeated=True,
        parse=extension_of,
        metavar="MODULE|FILE",
        role=CASES,
    )
    trust: bool = option(
        False,
        "also run private operators of torch that were not reviewed for accesses outside their tensors, for traces "
        "that you trust; --sandbox runs them too",
        role=CASES,
    )

    @property
    def devices(self) -> tuple[str, ...]:
        return () if self.device is None else tuple(self.device.split(","))

    @property
    def is_spread(self) -> bool:
        return len(self.devices) > 1

    @property
    def extensions(self) -> tuple[str, ...]:
        return (*TRUSTED_EXTENSIONS, *self.extension, *((ALL_OF_TORCH,) if self.trust else ()))


@dataclass(frozen=True, slots=True)
class Random:
    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        import torch

        from opgrip.replay.inputs.filling import normal

        if dtype.is_floating_point or dtype.is_complex:
            return normal(shape, dtype, generator)
        return torch.randint(0, 2, shape, generator=generator, device=generator.device).to(dtype)


@dataclass(frozen=True, slots=True)
class Zeros:
    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        import torch

        return torch.zeros(shape, dtype=dtype, device=generator.device)


@dataclass(frozen=True, slots=True)
class RepeatedPiece:
    model: Floats
    piece: int = PIECE

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        from math import prod

        count = prod(shape)
        # repeat whole rows, planes or images
        place = len(shape)
        while place and prod(shape[place - 1 :]) <= self.piece:
            place -= 1
        inner = shape[place:]
        rows = -(-self.piece // max(1, prod(inner)))
        if rows * prod(inner) >= count:
            return self.model.draw(shape, dtype, generator)
        piece = self.model.draw((rows, *inner), dtype, generator).reshape(-1)
        return piece.repeat(-(-count // len(piece)))[:count].reshape(shape)


_MODELS: Mapping[str, Drawable] = {RANDOM: Random(), ZEROS: Zeros()}


def with_values(
    signature: Signature, values: Mapping[int, Drawable], kind: str
) -> tuple[Signature, Mapping[int, Drawable]]:
    from opgrip.traces.schema.arguments import TensorSpec, map_leaves
    from opgrip.traces.schema.tensor_specs import map_values

    if kind in (RECORDED, REPEATED):
        signature, values = with_defaults(signature, values)
        return signature, (_shortened if kind == RECORDED else _repeated)(signature, values)

    def refer(leaf: object) -> object:
        return map_values(lambda number: 0, leaf) if isinstance(leaf, TensorSpec) else leaf

    changed = replace(signature, args=map_leaves(refer, signature.args), kwargs=map_leaves(refer, signature.kwargs))
    return changed, {0: _MODELS[kind]}


def _repeated(signature: Signature, values: Mapping[int, Drawable]) -> Mapping[int, Drawable]:
    from opgrip.traces.schema.arguments import numbers_of
    from opgrip.traces.values.floats import Floats

    numbers = {number for number in numbers_of((signature.args, signature.kwargs)) if number in values}
    models = {number: values[number] for number in numbers if number is not None}
    return {number: RepeatedPiece(model) if isinstance(model, Floats) else model for number, model in models.items()}


def _shortened(signature: Signature, values: Mapping[int, Drawable]) -> Mapping[int, Drawable]:
    from math import prod

    from opgrip.traces.schema.arguments import tensors
    from opgrip.traces.schema.operator_arguments import schema_arguments
    from opgrip.traces.schema.records import OPERATOR
    from opgrip.traces.values import depends_on_values
    from opgrip.traces.values.floats import Floats

    if signature.kind != OPERATOR:
        return values
    names = [name for name, _ in schema_arguments(signature.op)]
    if len(names) < len(signature.args):
        return values
    large: set[int | None] = set()
    deciding: set[int | None] = set()
    for name, tree in (*zip(names, signature.args, strict=False), *signature.kwargs.items()):
        for spec in tensors(tree):
            large |= {spec.values} if prod(spec.shape) > LONG_PIECE else set()
            deciding |= {spec.values} if depends_on_values(signature.op, name, spec.dtype) else set()
    shortened = {
        number: RepeatedPiece(model, LONG_PIECE)
        for number in large - deciding
        if number is not None and isinstance(model := values.get(number), Floats)
    }
    return {**values, **shortened} if shortened else values


def with_defaults(signature: Signature, values: Mapping[int, Drawable]) -> tuple[Signature, Mapping[int, Drawable]]:
    signature, models = _fill(signature, -1)
    return signature, {**values, **models} if models else values


def trace_with_defaults(trace: Trace) -> Trace:
    signatures: list[Signature] = []
    models: dict[int, ValueModel] = {}
    for signature in trace.signatures:
        filled, own = _fill(signature, -1 - len(models))
        signatures.append(filled)
        models |= own
    return replace(trace, signatures=signatures, values={**trace.values, **models}) if models else trace


def _fill(signature: Signature, first: int) -> tuple[Signature, dict[int, ValueModel]]:
    from opgrip.traces.schema.records import OPERATOR
    from opgrip.traces.values.defaults import default_values

    if signature.kind != OPERATOR:
        return signature, {}
    args, kwargs, models = default_values(signature.op, signature.args, signature.kwargs, signature.outputs, first)
    return (replace(signature, args=args, kwargs=kwargs), models) if models else (signature, {})
