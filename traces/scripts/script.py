"""Puts a script together."""

from __future__ import annotations

import keyword
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

from opgrip.errors import UserError
from opgrip.traces.formats.overloads import NAME
from opgrip.traces.schema.arguments import DTYPES, TensorSpec, leaves, tensors
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.scripts.functions import FUNCTIONS, MAIN
from opgrip.traces.scripts.literals import Literals, comment, plain, plain_tuple, shape
from opgrip.traces.scripts.tensors import tensor_lines
from opgrip.traces.scripts.values import ValueSource
from opgrip.traces.table.accelerators import device_of
from opgrip.traces.values import Drawable

STANDARD = ("argparse", "base64", "math", "statistics", "time", "zlib")
MOST_THREADS = 1 << 10


def script_of(
    signature: Signature, values: Mapping[int, Drawable], settings: Mapping[str, Any], facts: Sequence[str] = ()
) -> str:
    """A Python file that makes a call's arguments, calls the operator, checks its results' shapes and times it.

    Parameters
    ----------
    values : the models that the signature's tensors refer to
    settings : of torch, that the call ran under
    facts : lines to stand at the top as comments, whatever text they hold

    Raises
    ------
    UserError : for a call that torch alone cannot make
    """
    operator = _operator(signature)
    dynamic = torch.Tag.dynamic_output_shape in operator.tags
    device = device_of(signature)
    specs = list(tensors([signature.args, signature.kwargs]))
    names = iter(range(len(specs)))
    literals = Literals(lambda _: f"x{next(names)}", device)
    source = ValueSource(_deciding(specs) if dynamic else ())
    lines = list(tensor_lines(specs, values, literals, source))
    positional = plain_tuple([literals.of(item) for item in signature.args])
    named = _named(signature.kwargs, literals)
    results = _results(signature) if source.is_exact or not dynamic else None
    parts = [
        _head(signature, facts),
        f"OPERATOR = {_operator_source(signature.op)}",
        f"MUTATES = {operator._schema.is_mutable!r}",
        f"RECORDED_DEVICE = {device!r}",
        f"RECORDED_THREADS = {_threads(settings)}",
        f"RESULTS = {results}",
        *_settings(settings),
        *("\n" + FUNCTIONS[name].rstrip() for name in _ordered(source.helpers)),
        "",
        "",
        "def make_inputs(device):",
        '    """Fresh arguments, by position and by name."""',
        "    torch.manual_seed(0)",
        *(f"    {line}" for line in lines),
        f"    return {positional}, {named}",
        "",
        "",
    ]
    body = "\n".join(parts) + MAIN.lstrip()
    imports = [f"import {name}" for name in STANDARD if f"{name}." in body]
    return body.replace("IMPORTS\n", "\n".join([*imports, "", "import torch", "", ""]), 1)


def _deciding(specs: Sequence[TensorSpec]) -> set[torch.dtype]:
    """Dtypes of the tensors whose values decide how much a call gives: indices and masks where there are any."""
    dtypes = {spec.dtype for spec in specs}
    return {item for item in dtypes if not (item.is_floating_point or item.is_complex)} or dtypes


def _head(signature: Signature, facts: Sequence[str]) -> str:
    """The docstring, which is of our own words but for the operator's name, and comments."""
    lines = [
        f'"""A call of {signature.op} as a program made it: run it again with torch alone."""',
        "",
        *(f"# {comment(fact)}" for fact in facts),
        f"# made by opgrip {metadata.version('opgrip')}",
        "",
        "IMPORTS",
    ]
    return "\n".join(lines)


def _operator(signature: Signature) -> Any:
    """The overload that a signature names, which is registered."""
    if signature.kind != OPERATOR:
        raise UserError(f"{signature.op} is no operator of torch, but of the kind {signature.kind}", "opreplay runs it")
    match = NAME.fullmatch(signature.op)
    parts = signature.op.split(".")
    if match is None or len(parts) != 3 or not signature.op.isascii():
        raise UserError(f"{signature.op[:80]!r} is not an operator's name", "choose another case")
    try:
        operator = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except (AttributeError, RuntimeError):
        operator = None
    if not isinstance(operator, torch._ops.OpOverload):
        raise UserError(f"{signature.op} is not registered in torch {torch.__version__}", "choose another case")
    return operator


def _operator_source(op: str) -> str:
    source = "torch.ops"
    for part in op.split("."):
        source = f"getattr({source}, {part!r})" if keyword.iskeyword(part) else f"{source}.{part}"
    return source


def _named(kwargs: Mapping[str, Any], literals: Literals) -> str:
    return f"{{{', '.join(f'{name!a}: {literals.of(value)}' for name, value in kwargs.items())}}}"


def _results(signature: Signature) -> str | None:
    """What the call gave: shapes and dtypes; None where the trace does not say."""
    outputs = list(leaves(signature.outputs))
    specs = [leaf for leaf in outputs if isinstance(leaf, TensorSpec)]
    known = all(leaf is None or isinstance(leaf, TensorSpec | bool | int | float | complex) for leaf in outputs)
    plain_layout = all(spec.layout is torch.strided and spec.made_of is None for spec in specs)
    if signature.raised is not None or not known or not plain_layout:
        return None
    return f"[{', '.join(f'({shape(spec.shape)}, {spec.dtype})' for spec in specs)}]"


def _threads(settings: Mapping[str, Any]) -> int:
    threads = settings.get("threads")
    return threads if type(threads) is int and 0 < threads <= MOST_THREADS else 0


def _settings(settings: Mapping[str, Any]) -> Iterator[str]:
    """Statements for the settings that decide what a call computes."""
    dtype = DTYPES.get(str(settings.get("default_dtype")))
    if dtype is not None and dtype.is_floating_point and dtype != torch.float32:
        yield f"torch.set_default_dtype({plain(dtype)})"
    if settings.get("deterministic") is True:
        yield f"torch.use_deterministic_algorithms(True, warn_only={settings.get('deterministic_warn_only') is True})"
    if settings.get("matmul_precision") in ("high", "medium"):
        yield f"torch.set_float32_matmul_precision({settings['matmul_precision']!r})"


def _ordered(helpers: set[str]) -> list[str]:
    # sampled has data with it
    return [name for name in FUNCTIONS if name in helpers and not (name == "data" and "sampled" in helpers)]
