"""Program that runs one operator in each step: selection and coverage of the operators."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

import torch
from torch import nn

from opgrip.capture.models.operators.samples import RESIZERS, Coverage, SampleRunner, SampleScope, schema_entries
from opgrip.capture.models.operators.torch_tables import (
    ALL,
    CATEGORIES,
    CUSTOM,
    SCHEMA,
    Arguments,
    OperatorEntry,
    is_composite,
    is_custom,
    is_public,
    name_of,
    registered_operators,
    table_entries,
)
from opgrip.capture.models.program import ModelProgram
from opgrip.capture.models.sources import OPERATORS, ModelOptions, OperatorOptions
from opgrip.cli.command import did_you_mean
from opgrip.cli.output_files import check_writable
from opgrip.errors import UserError, cause_of
from opgrip.platform.machine import check_device
from opgrip.traces.schema.arguments import GeneratorSpec, Opaque, TensorSpec, leaves, map_leaves, tensors
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.table.trace import Trace, load
from opgrip.traces.values import ValueModel

NOT_RUN = "no sample calls it"
WITHOUT_TABLE = frozenset({CUSTOM, SCHEMA})  # categories of operators that need no entry in torch's table of OpInfos


@dataclass(frozen=True, slots=True)
class Operators:
    entries: Sequence[OperatorEntry]
    reasons: dict[str, str] = field(default_factory=dict)
    requested: Sequence[Any] = ()

    def add_uncovered(self, coverage: Coverage) -> None:
        for function in self.requested:
            name = name_of(function)
            if function not in coverage.operators:
                failed = (reason for entry, _, reason in coverage.failures if entry == name)
                coverage.uncovered[name] = self.reasons.get(name) or next(failed, NOT_RUN)


def choose(names: Sequence[str], seed: int) -> Operators:
    registered = [function for function in registered_operators() if _is_runnable(function)]
    entries: dict[str, OperatorEntry] = {}
    if not WITHOUT_TABLE.issuperset(names):
        for entry in table_entries():
            # some are listed twice
            entries.setdefault(entry.name, entry)
    chosen = {entry.name: entry for name in names for entry in entries.values() if _is_of(entry, name)}
    wanted_operators = [
        function for function in registered if {ALL, CUSTOM if is_custom(function) else SCHEMA} & set(names)
    ]
    named = [function for function in registered if any(_is_named(function, name) for name in names)]
    for name in names:
        is_known = name in CATEGORIES or any(_is_of(entry, name) for entry in chosen.values())
        if not is_known and not any(_is_named(function, name) for function in named):
            near = [*CATEGORIES, *entries, *map(name_of, registered)]
            raise UserError(f"unknown operator {name!r}", did_you_mean(name, near, "opinfo:all runs all operators"))
    # a named operator of torch's table is run by its entry there
    generated = wanted_operators if wanted_operators else [function for function in named if not chosen]
    samples, reasons = schema_entries([function for function in generated if not function._schema.is_mutable], seed)
    if named and not chosen and not samples and not wanted_operators:
        name = name_of(named[0])
        raise UserError(
            f"no sample inputs for {name} can be created", reasons.get(name, "it writes into its arguments")
        )
    return Operators([*chosen.values(), *samples], reasons, wanted_operators)


def _is_runnable(function: Any) -> bool:
    if is_custom(function):
        return not is_composite(function)
    is_out = any(argument.is_out for argument in function._schema.arguments)
    public = is_public(function)
    return public and not is_out and not is_composite(function)


def _is_of(entry: OperatorEntry, name: str) -> bool:
    if name in CATEGORIES:
        return name == ALL or name in entry.categories
    plain = re.sub(r"^(aten|torch)(\.|::)", "", name)
    # a name selects all of its variants
    return fnmatchcase(entry.name, plain) or entry.name.startswith(f"{plain}.")


def _is_named(function: Any, name: str) -> bool:
    full = name_of(function)
    plain = name.replace("::", ".")
    return plain not in CATEGORIES and (fnmatchcase(full, plain) or full.startswith(f"{plain}."))


def load_operators(text: str, options: ModelOptions) -> ModelProgram:
    request = options.operators
    device = check_device(options.device)
    if request.uncovered is not None:
        check_writable(request.uncovered, force=False)
    for name in request.import_:
        _import(name)
    names = [name for name in text.removeprefix(OPERATORS).split(",") if name]
    if not names:
        raise UserError(
            f"{text} names no operators", "opinfo:all runs all operators, opinfo:unary those of one category"
        )
    return operators_program(text, names, str(device), torch.initial_seed(), request)


def _import(name: str) -> None:
    try:
        import_module(name)
    except Exception as error:
        raise UserError(f"{name} cannot be imported", cause_of(error)) from error


def operators_program(
    source: str, names: Sequence[str], device: str, seed: int, options: OperatorOptions
) -> ModelProgram:
    """Build the program that runs the operators that `names` selects; each name is a category or an operator."""
    # before loading the table, which takes seconds
    trace = None if options.shapes_from is None else load(options.shapes_from)
    operators = choose(names, seed)
    coverage = Coverage()
    runner = SampleRunner(device, seed, options.per_dtype, coverage, RESIZERS.get(options.shapes))
    entries = list(operators.entries)
    if trace is not None:
        runner.most = 0
        entries = _entries_of_trace(operators, runner, trace, str(options.shapes_from))
    root = nn.Module()
    # named by their full names, which contain dots
    root._modules.update({entry.name: SampleScope() for entry in entries})
    remaining = iter(entries)

    def step(_: object) -> None:
        entry = next(remaining)
        scope = root._modules[entry.name]
        assert scope is not None
        # if operators were requested, generated samples run only if no other sample calls their operator
        is_spare = SCHEMA in entry.categories and len(operators.requested) > 0
        if not is_spare or entry.function not in coverage.operators:
            runner.run(entry, scope)

    def finish() -> Iterable[str]:
        operators.add_uncovered(coverage)
        if options.uncovered is not None:
            coverage.write(options.uncovered, force=True)
        return list(coverage.lines(options.uncovered))

    details: dict[str, Any] = {"source": source, "shapes": options.shapes, "per_dtype": options.per_dtype}
    if options.shapes_from is not None:
        details["shapes_from"] = str(options.shapes_from)
    return ModelProgram(
        name=re.sub(r"\W+", "_", source.partition(":")[2]).strip("_") or "operators",
        model=root,
        inputs=lambda: None,
        step=step,
        details=details,
        steps=len(entries),
        finish=finish,
    )


def _entries_of_trace(operators: Operators, runner: SampleRunner, trace: Trace, path: str) -> list[OperatorEntry]:
    functions = {str(function): function for function in runner.operators_of(operators.entries)}
    entries = list(trace_entries(trace, functions, runner.coverage))
    if not entries:
        raise UserError(
            f"{path} contains no call of the selected operators",
            f"see the operators that it calls with opgrip trace info {path}",
        )
    return entries


MOST_BYTES = 1 << 32  # maximum number of bytes of a generated tensor, because a trace may name any size


def trace_entries(trace: Trace, functions: Mapping[str, Any], coverage: Coverage) -> Iterator[OperatorEntry]:
    by_op: dict[str, list[Signature]] = {}
    for signature in trace.signatures:
        if signature.kind == OPERATOR and signature.op in functions:
            reason = _why_not(signature)
            if reason:
                coverage.fail(signature.op, "", reason)
            else:
                by_op.setdefault(signature.op, []).append(signature)
    for op, signatures in by_op.items():
        yield _entry(functions[op], signatures, trace.values)


def _entry(function: Any, signatures: list[Signature], values: Mapping[int, ValueModel]) -> OperatorEntry:
    by_dtype: dict[torch.dtype, list[Signature]] = {}
    for signature in signatures:
        first = next((spec.dtype for spec in tensors([signature.args, signature.kwargs])), torch.float32)
        by_dtype.setdefault(first, []).append(signature)

    def samples(device: str, dtype: torch.dtype, wants_grad: bool) -> Iterator[Arguments]:
        for signature in by_dtype[dtype]:
            yield _arguments(signature, values, device, wants_grad)

    is_mutable = function._schema.is_mutable
    return OperatorEntry(
        name=str(function),
        categories=frozenset(),
        function=function,
        dtypes=lambda device: tuple(by_dtype),
        differentiable=lambda device: frozenset(
            dtype for dtype in by_dtype if not is_mutable and (dtype.is_floating_point or dtype.is_complex)
        ),
        samples=samples,
    )


def _why_not(signature: Signature) -> str:
    tree = [signature.args, signature.kwargs]
    if signature.raised is not None:
        return "it raised when it was captured"
    if any(isinstance(leaf, Opaque) for leaf in leaves(tree)):
        return "an argument that a trace cannot hold"
    for spec in tensors(tree):
        if spec.stride is None or spec.made_of is not None or spec.cls is not None:
            return "a tensor that is not strided"
        if spec.extent > MOST_BYTES:
            return "a tensor that is too large"
    return ""


def _arguments(signature: Signature, values: Mapping[int, ValueModel], device: str, wants_grad: bool) -> Arguments:
    def make(leaf: Any) -> Any:
        if isinstance(leaf, TensorSpec):
            return _tensor(leaf, values, device, wants_grad)
        if isinstance(leaf, GeneratorSpec):
            return torch.Generator(device).manual_seed(leaf.seed)
        return torch.device(device) if isinstance(leaf, torch.device) else leaf

    args, kwargs = map_leaves(make, (signature.args, signature.kwargs))
    return args, kwargs


def _tensor(spec: TensorSpec, values: Mapping[int, ValueModel], device: str, wants_grad: bool) -> torch.Tensor:
    stride = spec.stride
    assert stride is not None, "checked before"
    tensor = torch.empty_strided(spec.shape, stride, dtype=spec.dtype, device=device)
    model = None if spec.values is None else values.get(spec.values)
    if model is not None and tensor.numel():
        generator = torch.Generator(device).manual_seed(torch.initial_seed())
        drawn = model.draw(spec.shape, spec.dtype, generator)
        # if elements share memory, write only one index of each dimension
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)
        tensor[once].copy_(drawn[once])
    else:
        tensor.zero_()
    has_gradient = wants_grad and (spec.dtype.is_floating_point or spec.dtype.is_complex)
    return tensor.requires_grad_() if has_gradient else tensor
