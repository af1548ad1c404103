"""Conversion of one call of an operator, a module or a function to a Python script that only needs torch."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from math import prod
from typing import Any

import torch

from opgrip.errors import UserError
from opgrip.traces.formats.operator_schemas import OPERATOR_NAME
from opgrip.traces.schema.arguments import DTYPES, TensorSpec, leaves, tensors
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.schema.tensor_specs import STORAGE
from opgrip.traces.scripts.literals import FEW, Literals, ValueSource, comment, plain, plain_tuple, sizes
from opgrip.traces.scripts.templates import FUNCTIONS, MAIN
from opgrip.traces.table.accelerators import device_of
from opgrip.traces.values import Drawable

ADDRESSES = 1 << 62


def tensor_lines(
    specs: Sequence[TensorSpec], values: Mapping[int, Drawable], literals: Literals, source: ValueSource
) -> Iterator[str]:
    """Yield the statements that create the tensors `x0`, `x1`, ...; `specs[0]` describes `x0`."""
    for spec in specs:
        _check(spec)
    fills: list[tuple[int, str]] = []
    memory: dict[int, str] = {}
    for index, spec in enumerate(specs):
        model = None if spec.values is None else values.get(spec.values)
        name, device = f"x{index}", literals.device(spec.device)
        if spec.storage is None and spec.offset == 0 and _is_plain(spec):
            moved = "" if device == '"cpu"' else f".to({device})"
            yield f"{name} = {source.of(model, spec.shape, spec.dtype)}{moved}"
            continue
        number = spec.storage if spec.storage is not None else -1 - index
        if number not in memory:
            memory[number] = f"memory{len(memory)}"
            alike = [item for item in specs if item.storage == spec.storage] if spec.storage is not None else [spec]
            size = max(item.extent for item in alike)
            yield f"{memory[number]} = torch.zeros({size}, dtype=torch.uint8, device={device}).untyped_storage()"
        source.helpers.add("view")
        yield f"{name} = {_view(memory[number], spec, spec.shape, spec.stride or ())}"
        if prod(spec.shape):
            fills.append((index, memory[number]))
    # of tensors in the same memory, the smaller one has more specific values
    for index, name in sorted(fills, key=lambda item: -prod(specs[item[0]].shape)):
        spec = specs[index]
        source.helpers.add("fill")
        yield _fill(index, name, spec, None if spec.values is None else values.get(spec.values), source)
    for index, spec in enumerate(specs):
        yield from _bits(f"x{index}", spec)


def _check(spec: TensorSpec) -> None:
    name = str(spec.layout).removeprefix("torch.")
    is_plain = spec.made_of is None and spec.layout is torch.strided and spec.stride is not None
    if not is_plain or spec.cls not in (None, STORAGE):
        kind = spec.cls if spec.cls is not None else "quantized" if spec.layout is torch.strided else name
        raise UserError(f"unsupported tensor: {str(kind)[:60]!r}", "replay it with opreplay")
    if spec.device == "meta":
        raise UserError("a tensor is on the meta device", "choose another case")
    if spec.extent >= ADDRESSES or prod(spec.shape) >= ADDRESSES:
        raise UserError("a tensor is larger than the address space", "choose another case")
    if spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype in _WHOLE:
        return
    raise UserError(f"unsupported dtype: {str(spec.dtype).removeprefix('torch.')}", "replay it with opreplay")


_WHOLE = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
)


def _is_plain(spec: TensorSpec) -> bool:
    step = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride or ()), strict=True):
        # torch does not look at the stride of a single element, and neither does it keep it
        if stride != step:
            return False
        step *= max(size, 1)
    return True


def _view(memory: str, spec: TensorSpec, shape: Sequence[int], stride: Sequence[int]) -> str:
    return f"view({memory}, {spec.dtype}, {spec.offset}, {sizes(shape)}, {sizes(stride)})"


def _fill(index: int, memory: str, spec: TensorSpec, model: Drawable | None, source: ValueSource) -> str:
    stride = spec.stride or ()
    once = tuple(1 if step == 0 else size for size, step in zip(spec.shape, stride, strict=True))
    if prod(spec.shape) <= FEW:
        # recorded one by one: for each element, not for each place in memory
        return f"fill(x{index}, {source.of(model, spec.shape, spec.dtype)})"
    if _has_windows(once, stride):
        length = 1 + sum((size - 1) * step for size, step in zip(once, stride, strict=True))
        flat = _view(memory, spec, (length,), (1,))
        return f"fill({flat}, {source.of(model, (length,), spec.dtype)})"
    return f"fill(x{index}, {source.of(model, once, spec.dtype)})"


def _has_windows(shape: Sequence[int], stride: Sequence[int]) -> bool:
    reach = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False


def _bits(name: str, spec: TensorSpec) -> Iterator[str]:
    if spec.conj:
        yield f"{name} = {name}.conj()"
    if spec.neg:
        yield f"{name} = torch._neg_view({name})"
    if spec.requires_grad:
        yield f"{name}.requires_grad_()"


STANDARD = ("argparse", "base64", "collections", "math", "runpy", "statistics", "time", "zlib")
MOST_THREADS = 1 << 10


@dataclass(frozen=True, slots=True)
class ScriptFunction:
    """The function that a script runs.

    source : statements that define `OPERATOR`; they follow the script's imports
    is_dynamic : True if the shapes of its results depend on values
    """

    title: str
    source: str
    mutates: bool
    is_dynamic: bool
    preamble: str = ""
    helpers: Sequence[str] = ()


def script_of(
    signature: Signature,
    values: Mapping[int, Drawable],
    settings: Mapping[str, Any],
    facts: Sequence[str] = (),
    function: ScriptFunction | None = None,
    mode: str = "eager",
    literals: Callable[[Callable[[TensorSpec], str], str], Literals] = Literals,
) -> str:
    """Return a script that creates a call's arguments, and calls and times the operator.

    values : value models of the signature's tensors
    facts : descriptions of the call, for comments at the top; they may be untrusted
    function : function to call; None for the signature's operator
    """
    function = function or _function_of(signature)
    device = device_of(signature)
    specs = list(tensors([signature.args, signature.kwargs]))
    names = iter(range(len(specs)))
    writer = literals(lambda spec: f"x{next(names)}{'.untyped_storage()' if spec.cls == STORAGE else ''}", device)
    source = ValueSource(_deciding(specs) if function.is_dynamic else ())
    lines = list(tensor_lines(specs, values, writer, source))
    positional = plain_tuple([writer.of(item) for item in signature.args])
    named = ", ".join(f"{name!a}: {writer.of(value)}" for name, value in signature.kwargs.items())
    threads = settings.get("threads")
    results = _results(signature) if source.is_exact or not function.is_dynamic else None
    parts = [
        f"MODE = {plain(mode)}",
        f"MUTATES = {function.mutates!r}",
        f"RECORDED_DEVICE = {device!r}",
        f"RECORDED_THREADS = {threads if type(threads) is int and 0 < threads <= MOST_THREADS else 0}",
        f"RESULTS = {results}",
        *_settings(settings),
        function.source,
        *function.helpers,
        # `sampled` contains `data`
        *(
            "\n" + text.rstrip()
            for name, text in FUNCTIONS.items()
            if name in source.helpers and not (name == "data" and "sampled" in source.helpers)
        ),
        "",
        "",
        "def make_inputs(device):",
        '    """Return new arguments, by position and by name."""',
        "    torch.manual_seed(0)",
        *(f"    {line}" for line in lines),
        f"    return {positional}, {{{named}}}",
        "",
        "",
    ]
    body = "\n".join(parts) + MAIN.lstrip()
    imports = [f"import {name}" for name in STANDARD if f"{name}." in body]
    return "\n".join([_head(function, facts), *imports, "", "import torch", "", body])


def _deciding(specs: Sequence[TensorSpec]) -> set[torch.dtype]:
    # values of indices and masks decide the shape of a result; without them, values of any tensor may
    dtypes = {spec.dtype for spec in specs}
    return {item for item in dtypes if not (item.is_floating_point or item.is_complex)} or dtypes


def _function_of(signature: Signature) -> ScriptFunction:
    operator = registered_operator(signature)
    return ScriptFunction(
        f"A call of {signature.op} as a program made it.",
        f"OPERATOR = {operator_source(signature.op)}",
        operator._schema.is_mutable,
        torch.Tag.dynamic_output_shape in operator.tags,
    )


def _head(function: ScriptFunction, facts: Sequence[str]) -> str:
    lines = [
        function.preamble or f'"""{function.title} This script only needs torch."""\n',
        *(f"# {comment(fact)}" for fact in facts),
        f"# made by opgrip {metadata.version('opgrip')}",
        "",
    ]
    return "\n".join(lines)


def registered_operator(signature: Signature) -> Any:
    if signature.kind != OPERATOR:
        raise UserError(
            f"{signature.op} is not a registered operator of torch (its calls have the kind '{signature.kind}')",
            "replay it with opreplay",
        )
    match = OPERATOR_NAME.fullmatch(signature.op)
    parts = signature.op.split(".")
    if match is None or len(parts) != 3 or not signature.op.isascii():
        raise UserError(f"{signature.op[:80]!r} is not the name of an operator", "choose another case")
    try:
        operator = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except (AttributeError, RuntimeError):
        operator = None
    if not isinstance(operator, torch._ops.OpOverload):
        raise UserError(f"{signature.op} is not registered in torch {torch.__version__}", "choose another case")
    return operator


def operator_source(op: str) -> str:
    source = "torch.ops"
    for part in op.split("."):
        source = f"getattr({source}, {part!r})" if keyword.iskeyword(part) else f"{source}.{part}"
    return source


def _results(signature: Signature) -> str | None:
    outputs = list(leaves(signature.outputs))
    specs = [leaf for leaf in outputs if isinstance(leaf, TensorSpec)]
    are_known = all(leaf is None or isinstance(leaf, TensorSpec | bool | int | float | complex) for leaf in outputs)
    plain_layout = all(spec.layout is torch.strided and spec.made_of is None for spec in specs)
    if signature.raised is not None or not are_known or not plain_layout:
        return None
    return f"[{', '.join(f'({sizes(spec.shape)}, {spec.dtype})' for spec in specs)}]"


_STATEMENTS = {
    ("fill_uninitialized_memory", False): "torch.utils.deterministic.fill_uninitialized_memory = False",
    ("mkldnn", False): "torch.backends.mkldnn.enabled = False",
    ("flush_denormal", True): "torch.set_flush_denormal(True)",
}


def _settings(settings: Mapping[str, Any]) -> Iterator[str]:
    dtype = DTYPES.get(str(settings.get("default_dtype")))
    if dtype is not None and dtype.is_floating_point and dtype != torch.float32:
        yield f"torch.set_default_dtype({plain(dtype)})"
    if settings.get("deterministic") is True:
        yield f"torch.use_deterministic_algorithms(True, warn_only={settings.get('deterministic_warn_only') is True})"
    yield from (line for (name, value), line in _STATEMENTS.items() if settings.get(name) is value)
    if settings.get("matmul_precision") in ("high", "medium"):
        yield f"torch.set_float32_matmul_precision({settings['matmul_precision']!r})"
