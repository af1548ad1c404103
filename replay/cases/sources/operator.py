"""The source of cases for operators named on the command line by `--operator`, with arguments given by `--inputs`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from opgrip.cli.command import WILD, did_you_mean
from opgrip.cli.option_types import matches
from opgrip.errors import UserError
from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.selection import ALL_EXCLUDED, Selection
from opgrip.replay.cases.sources import CaseSet, sources
from opgrip.replay.cases.unused_results import require_gradients
from opgrip.replay.operators.admission import TRUSTED_EXTENSIONS, check_import
from opgrip.replay.operators.lookup import mutates, namespaces_of
from opgrip.replay.operators.torch_private import operator_names
from opgrip.traces.formats.operator_schemas import bind, op_of, operator_name, schemas_of
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.json_values import NESTING
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.schema.tensor_specs import DTYPES, LAYOUTS, MEMORY_FORMATS, contiguous

PREFIX = "operator:"
MOST_CONFIGURATIONS = 100_000
LONGEST = 1 << 62
NAME = re.compile(r"_?[A-Za-z]\w*(?:(?:\.|::)\w+){0,3}|_\w+")
# names of arguments that are integer tensors by default
WHOLE = ("index", "indices", "target", "targets", "offsets", "repeats", "lengths", "input_lengths", "target_lengths")
BOOLEAN = ("mask", "condition")  # names of arguments that are bool tensors by default
FORM = """give the arguments by name: --inputs '{"self": [1024, 1024], "other": [1024, 1024]}'"""
TENSOR_KEYS = {"shape", "stride", "dtype", "device"}


class OperatorSource:
    lacks: Sequence[str] = ("traces", "samples")
    hint = "leave it out with --operator"
    place = 50
    in_program = False

    def takes(self, target: str) -> bool:
        return target.startswith(PREFIX)

    def open(self, target: str, selection: Selection, extensions: Collection[str]) -> CaseSet:
        names, _, configurations = target.removeprefix(PREFIX).partition(" ")
        own_extensions = _needed(names.split(","), extensions)
        for extension in own_extensions:
            namespaces_of(extension)
        signatures = list(_signatures(names.split(","), json.loads(configurations)))
        share = 1 / len(signatures)
        cases = [
            Case(signature, {}, 1, 0.0, 0.0, share)
            for signature in signatures
            if matches(signature.op, selection.op) and not selection.excludes(signature.op)
        ]
        if not cases:
            raise UserError(*ALL_EXCLUDED)
        return CaseSet(cases[: selection.top], has_run_code=bool(own_extensions))

    def fingerprint(self, target: str) -> str:
        return hashlib.blake2b(target.encode(), digest_size=16).hexdigest()


def target_of(operators: Sequence[str], inputs: Sequence[str], extensions: Sequence[str] = ()) -> str:
    """Return one target text for `--operator` and `--inputs`, such as `operator:aten.mm [{"self": [4, 4], ...}]`.

    inputs : JSON texts, each an object of arguments by name, or a list of such objects
    """
    configurations: list[Any] = []
    for text in inputs:
        form = _parse(text)
        configurations += form if isinstance(form, list) else [form]
    if not all(isinstance(form, dict) for form in configurations):
        raise UserError("--inputs is not a JSON object of arguments, nor a list of such objects", FORM)
    if len(configurations) > MOST_CONFIGURATIONS:
        raise UserError(f"--inputs has more than {MOST_CONFIGURATIONS:,} configurations", "give fewer")
    forms = configurations or [{}]
    named = [name.strip() for text in operators for name in text.split(",")]
    for extension in extensions if any(map(_is_pattern, named)) else ():
        check_import(extension)
        namespaces_of(extension)
    names = list(dict.fromkeys(chain.from_iterable(_expanded(name, forms) for name in named)))
    if not all(map(NAME.fullmatch, names)):
        raise UserError(f"{','.join(names)[:60]!r} is not the name of an operator", "write aten.add.Tensor or aten.mm")
    for extension in _needed(names, extensions):
        check_import(extension)
    return f"{PREFIX}{','.join(names)} {json.dumps(forms)}"


def _is_pattern(name: str) -> bool:
    return any(letter in name for letter in WILD)


def _expanded(name: str, configurations: Sequence[Mapping[str, Any]]) -> list[str]:
    if not _is_pattern(name):
        return [name]
    pattern = name.replace("::", ".")
    every = sorted({op_of(schema) for full_name in operator_names() for schema in schemas_of(full_name)})
    matched = [op for op in every if matches(op, [pattern]) or matches(op.rpartition(".")[0], [pattern])]
    if not matched:
        raise UserError(
            f"no operator matches {name[:60]!r}", "use a pattern such as 'aten.add*', or a name such as aten.add"
        )
    taking = [op for op in matched if _takes(op, configurations)]
    if not taking:
        raise UserError(f"no operator that matches {name[:60]!r} takes these arguments", FORM)
    return taking


def _takes(name: str, configurations: Sequence[Mapping[str, Any]]) -> bool:
    try:
        return all(_bound(name, schemas_of(name), form) for form in configurations)
    except UserError:
        return False


def _needed(operators: Sequence[str], extensions: Collection[str]) -> list[str]:
    if all(_schemas_of(name) for name in operators):
        return []
    return [name for name in extensions if name not in TRUSTED_EXTENSIONS]


def name_of_target(target: str) -> str:
    return target.partition(" ")[0].replace(":", "_").replace(".", "_")[:60]


def _parse(text: str) -> Any:
    try:
        if text.count("[") + text.count("{") > NESTING and _depth(text) > NESTING:
            raise ValueError("it is nested too deeply")
        return json.loads(text, object_pairs_hook=_object_without_repeats)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--inputs cannot be read ({error})"[:200], FORM) from error


def _depth(text: str) -> int:
    depth = most = 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        most = max(most, depth)
    return most


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    form = dict(pairs)
    if len(form) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)[:60]!r} occurs more than once")
    return form


def _signatures(operators: Sequence[str], configurations: Sequence[Mapping[str, Any]]) -> Iterator[Signature]:
    number = 0
    for name in operators:
        schemas = _schemas_of(name)
        if not schemas:
            raise UserError(f"no operator {name!r} is registered", _hint_for_name(name))
        for form in configurations:
            op, args, kwargs = _bound(name, schemas, form)
            signature = Signature(number, OPERATOR, op, args, kwargs)
            yield signature if mutates(signature) else require_gradients(signature)
            number += 1


def _schemas_of(name: str) -> list[Any]:
    return schemas_of(name) or schemas_of(operator_name(_in_torch(name)))


def _in_torch(name: str) -> str:
    for short in ("F.", "nn.functional."):
        if name.startswith(short):
            return f"torch.nn.functional.{name.removeprefix(short)}"
    return name


def _bound(name: str, schemas: Sequence[Any], form: Mapping[str, Any]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    reasons: list[str] = []
    for schema in schemas:
        try:
            values = _arguments(schema, form)
            bound = bind(op_of(schema), (), values)
        except ValueError as error:
            reasons.append(str(error))
            continue
        return bound.op, bound.args, bound.kwargs
    overloads = [op_of(schema) for schema in schemas[1:] if not schema.is_mutable]
    others = f"; other overloads: {', '.join(overloads[:8])}" if overloads else ""
    raise UserError(f"{name} takes no such arguments ({reasons[0]})", f"its schema is {schemas[0]}{others}")


def _arguments(schema: Any, form: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {argument.name: argument for argument in schema.arguments}
    unknown = [name for name in form if name not in parameters]
    if unknown:
        raise ValueError(f"{op_of(schema)} has no argument {unknown[0][:60]}")
    return {name: _value(value, parameters[name].type, name) for name, value in form.items()}


def _value(value: Any, kind: Any, name: str) -> Any:
    match kind.kind():
        case "OptionalType":
            return None if value is None else _value(value, kind.getElementType(), name)
        case "TensorType":
            return _tensor(value, name)
        case "ListType":
            inner = kind.getElementType()
            return [_value(item, inner, name) for item in value] if isinstance(value, list) else value
        case "IntType" if isinstance(value, str):
            for table in (DTYPES, LAYOUTS, MEMORY_FORMATS):
                if value in table:
                    return table[value]
            raise ValueError(f"{name} is {value[:60]!r}, which is not a dtype, layout or memory format")
        case "DeviceObjType" if isinstance(value, str):
            return _device(value)
        case "FloatType" | "NumberType" if value in ("inf", "-inf", "nan"):
            return float(value)
        case _:
            return value


def _tensor(form: Any, name: str) -> TensorSpec:
    if isinstance(form, list):
        form = {"shape": form}
    if not isinstance(form, dict) or "shape" not in form or not form.keys() <= TENSOR_KEYS:
        raise ValueError(f"{name} is a tensor: give its shape, or an object with {', '.join(sorted(TENSOR_KEYS))}")
    shape = _sizes(form["shape"], name)
    stride = _sizes(form["stride"], name) if "stride" in form else contiguous(shape)
    if len(stride) != len(shape):
        raise ValueError(f"{name} must have as many strides as sizes")
    dtype = DTYPES.get(form["dtype"]) if isinstance(form.get("dtype"), str) else _usual_dtype(name)
    if dtype is None or not isinstance(form.get("dtype", ""), str):
        raise ValueError(f"the dtype of {name} is not a dtype of torch")
    device = str(_device(form.get("device", "cpu")))
    return TensorSpec(shape, stride, dtype, device)


def _usual_dtype(name: str) -> torch.dtype:
    if name in WHOLE:
        return torch.int64
    return torch.bool if name in BOOLEAN else torch.float32


def _sizes(form: Any, name: str) -> tuple[int, ...]:
    if not isinstance(form, list) or not all(type(size) is int and 0 <= size < LONGEST for size in form):
        raise ValueError(f"the sizes of {name} must be a list of integers from 0 to {LONGEST - 1}")
    return tuple(form)


def _device(name: Any) -> torch.device:
    try:
        return torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{str(name)[:60]!r} is not a device") from error


def _hint_for_name(name: str) -> str:
    is_bare = name.isidentifier()
    name = operator_name(_in_torch(name)).replace("::", ".")
    packet = name.split(".")[-2 if name.count(".") > 1 else -1]
    hint = did_you_mean(packet, [other for other in dir(torch.ops.aten) if not other.startswith("__")], form="aten.{}")
    if hint or not is_bare:
        return hint or "write aten.add.Tensor or aten.mm"
    return f"capture sample inputs of such operators with: opcapture --model opinfo:{packet[:40]}"


sources.register("operator")(OperatorSource())
