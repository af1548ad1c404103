"""Parser of operator schemas, and search for the overload that accepts a call's arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from opgrip.traces.io.foreign_files import Losses
from opgrip.traces.schema.arguments import GeneratorSpec, TensorSpec
from opgrip.traces.schema.operator_arguments import schema_named
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.schema.tensor_specs import DTYPES, LAYOUTS, MEMORY_FORMATS

MOST_CHARACTERS = 1 << 14  # maximum number of characters of a schema; torch's longest has less than two thousand
NAME = re.compile(r"([A-Za-z_]\w*)::([A-Za-z_]\w*)(?:\.([A-Za-z_]\w*))?")


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter of an operator, as its schema declares it.

    type : type without alias and length, such as `Tensor?`, `ScalarType`, `SymInt[]`
    declared_type : type as in the text, such as `Tensor(a!)`, `int[2]`
    """

    name: str
    type: str
    declared_type: str
    is_named: bool


@dataclass(frozen=True, slots=True)
class SchemaText:
    """A schema of an operator, parsed from its text.

    are_aliases : for each result, True if it shares memory with an argument
    """

    name: str
    parameters: tuple[Parameter, ...]
    returns: str
    are_aliases: tuple[bool, ...]

    @property
    def op(self) -> str:
        namespace, _, rest = self.name.partition("::")
        packet, _, overload = rest.partition(".")
        return f"{namespace}.{packet}.{overload or 'default'}"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters)

    def text(self, plain_type: Callable[[str], str]) -> str:
        parameters = [f"{plain_type(parameter.declared_type)} {parameter.name}" for parameter in self.parameters]
        return f"{self.name}({', '.join(parameters)}) -> {plain_type(self.returns)}"


def parse_schema(text: str) -> SchemaText | None:
    return _parse(text) if len(text) <= MOST_CHARACTERS else None


@lru_cache(maxsize=2048)
def _parse(text: str) -> SchemaText | None:
    head, _, rest = text.partition("(")
    name = NAME.fullmatch(head.strip())
    declared, end = _split(rest)
    if name is None or end is None:
        return None
    parameters: list[Parameter] = []
    is_named = False
    for piece in declared:
        if piece == "*":
            is_named = True
            continue
        kind, _, word = " ".join(piece.partition("=")[0].split()).rpartition(" ")
        if not word.isidentifier() or not kind:
            return None
        # without alias and length, as in Tensor(a!), Tensor(a -> *)[], Tensor(a|b), int[2]
        plain = re.sub(r"\([^()]*\)", "", re.sub(r"\[\d+\]", "[]", kind)).strip()
        parameters.append(Parameter(word, plain, kind, is_named))
    returns = rest[end + 1 :].strip().removeprefix("->").strip()
    results, end = _split(returns.removeprefix("("))
    if not returns.startswith("(") or end != len(returns) - 2:
        results, _ = _split(returns)
    return SchemaText(head.strip(), tuple(parameters), returns, tuple("(" in kind for kind in results))


def pieces(text: str) -> Iterator[str]:
    """Yield the parts of a text between commas that are outside of brackets and quotes, without surrounding spaces."""
    return iter(_split(text)[0])


def _split(text: str) -> tuple[list[str], int | None]:
    # the parts before the first closing bracket that has no opening one, and the position of that bracket
    parts, depth, start, quote = [], 0, 0, ""
    end = None
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "([<":
            depth += 1
        elif character in ")]>" and text[position - 1] != "-":
            depth -= 1
            if depth < 0:
                end = position
                break
        elif character == "," and not depth:
            parts.append(text[start:position].strip())
            start = position + 1
    if last := text[start:end].strip():
        parts.append(last)
    return parts, end


# pattern of names such as `aten::add`, `aten::add.Tensor`, `aten.add.default`
OPERATOR_NAME = re.compile(r"(_?[A-Za-z]\w*)(?:::|\.)([A-Za-z_]\w*)(?:\.([A-Za-z_]\w*))?")
MOST_NOTES = 50  # maximum number of replaced overloads that are reported
NAME_OF_OVERLOAD = re.compile(r"(?:::|\.)[A-Za-z_]\w*\.[A-Za-z_]\w*$")


class NotConverted(ValueError):
    """A call that the other format, or torch, does not have; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Bound:
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def bind(name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Bound:
    """Return the call of the overload that accepts these arguments. Raises `NotConverted` if no overload accepts them.

    name : operator with or without overload; a name without a namespace is one of aten
    args, kwargs : arguments, in which tensors are `TensorSpec`; keyword-only arguments may be among `args`
    """
    schemas = schemas_of(name)
    if not schemas:
        raise NotConverted(f"not registered in torch {torch.__version__.partition('+')[0]}")
    reasons = []
    for schema in schemas:
        result = _bind(schema, args, dict(kwargs or {}), NAME_OF_OVERLOAD.search(name) is not None)
        if isinstance(result, Bound):
            return result
        reasons.append(result)
    raise NotConverted(reasons[0] if len(reasons) == 1 else f"no overload of {name} takes these arguments")


def registered(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], losses: Losses) -> Bound:
    """Return the call of the overload that a file names, or of another that accepts the arguments if torch lacks it."""
    as_named = Bound(name, tuple(args), _with_device(kwargs))
    packet, _, overload = name.rpartition(".")
    if torch_schema(name) is not None or "." not in packet:
        return as_named
    try:
        call = bind(packet, args, as_named.kwargs)
    except NotConverted:
        return as_named
    note = f"{name}: torch has no overload {overload}, so the call is read as {call.op}"
    if note not in losses.defaults and len(losses.defaults) < MOST_NOTES:
        losses.defaults.append(note)
    return call


def _with_device(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    device = kwargs.get("device")
    if isinstance(device, str):
        try:
            return {**kwargs, "device": torch.device(device)}
        except RuntimeError:
            pass
    return dict(kwargs)


torch_schema = lru_cache(maxsize=8192)(schema_named)


def schemas_of(name: str) -> list[Any]:
    """Return torch's schemas of an operator's overloads; if `name` includes an overload, return only its schema."""
    match = OPERATOR_NAME.fullmatch(name if re.search(r"::|\.", name) else f"aten::{name}")
    if match is None:
        return []
    namespace, packet, overload = match.groups()
    schemas = torch._C._jit_get_schemas_for_operator(f"{namespace}::{packet}")
    if overload is not None:
        schemas = [item for item in schemas if (item.overload_name or "default") == overload]
    return sorted(schemas, key=lambda schema: not _is_dispatched(schema))


def op_of(schema: Any) -> str:
    return f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"


def _dispatcher_name(schema: Any) -> str:
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def _is_dispatched(schema: Any) -> bool:
    try:
        return bool(torch._C._dispatch_has_kernel(_dispatcher_name(schema)))
    except RuntimeError:
        return False


def has_composite_kernel(schema: Any) -> bool | None:
    """Return True if the dispatcher runs other operators in place of an overload; None if only TorchScript has it."""
    try:
        return bool(
            torch._C._dispatch_has_kernel_for_dispatch_key(_dispatcher_name(schema), "CompositeImplicitAutograd")
        )
    except RuntimeError:
        return None


def _bind(schema: Any, args: Sequence[Any], kwargs: dict[str, Any], is_named: bool) -> Bound | str:
    parameters = schema.arguments
    if len(args) > len(parameters):
        return f"{op_of(schema)} takes {len(parameters)} arguments, not {len(args)}"
    values = dict(zip((parameter.name for parameter in parameters), args, strict=False))
    for name, value in kwargs.items():
        if name in values:
            return f"{op_of(schema)} has two values for its argument {name}"
        values[name] = value
    names = {parameter.name for parameter in parameters}
    if unknown := [name for name in values if name not in names]:
        return f"{op_of(schema)} has no argument {unknown[0]}"
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.name not in values:
            if not parameter.has_default_value():
                return f"{op_of(schema)} lacks its argument {parameter.name}"
            continue
        value = values[parameter.name]
        is_number = is_named and type(value) in (bool, int, float, complex) and parameter.type.kind() == "TensorType"
        if not is_number and not _fits(value, parameter.type, parameter.N):
            return f"{op_of(schema)} does not accept its argument {parameter.name}"
        if parameter.kwarg_only or len(positional) < parameters.index(parameter):
            named[parameter.name] = value
        else:
            positional.append(value)
    return Bound(op_of(schema), tuple(positional), named)


def arguments_in_order(signature: Signature) -> tuple[str, SchemaText, list[Any]]:
    """Return the schema of a recorded call's operator as text and parsed, and the values of all its parameters.

    Raises `NotConverted` if the call is not of an operator that torch has, or its arguments do not match the schema.
    """
    if signature.kind != OPERATOR:
        raise NotConverted("not an operator of torch's dispatcher")
    text, schema, defaults = _schema_with_defaults(signature.op)
    names = schema.names
    if len(signature.args) > len(names) or not set(signature.kwargs) <= set(names):
        raise NotConverted(f"its arguments do not match its schema, {text[:100]}")
    arguments = {**defaults, **dict(zip(names, signature.args, strict=False)), **signature.kwargs}
    missing = [name for name in names if name not in arguments]
    if missing:
        raise NotConverted(f"its argument {missing[0]} is missing")
    return text, schema, [arguments[name] for name in names]


@lru_cache(maxsize=4096)
def _schema_with_defaults(op: str) -> tuple[str, SchemaText, dict[str, Any]]:
    schema = torch_schema(op)
    text = "" if schema is None else str(schema)
    parsed = parse_schema(text)
    if parsed is None:
        raise NotConverted("not registered in this torch, so its schema is unknown")
    defaults = {item.name: item.default_value for item in schema.arguments if item.has_default_value()}
    return text, parsed, defaults


def without_defaults(bound: Bound) -> Bound:
    """Return a call without arguments that equal their defaults, if these are named or come last."""
    defaults = _typed_defaults(bound.op)
    kwargs = {name: value for name, value in bound.kwargs.items() if not _is_default(value, defaults.get(name))}
    args, positional = list(bound.args), list(defaults.values())
    while args and len(args) <= len(positional) and _is_default(args[-1], positional[len(args) - 1]):
        args.pop()
    return Bound(bound.op, tuple(args), kwargs)


@lru_cache(maxsize=8192)
def _typed_defaults(op: str) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for parameter in getattr(torch_schema(op), "arguments", ()):
        default = parameter.default_value if parameter.has_default_value() else None
        if isinstance(default, list) and parameter.N and len(default) == 1:
            default = default * parameter.N
        defaults[parameter.name] = _with_type(default) if parameter.has_default_value() else None
    return defaults


def _is_default(value: Any, typed_default: Any) -> bool:
    if typed_default is None or isinstance(value, TensorSpec):
        return False
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        # schemas have their codes
        value = CODE_OF_VALUE.get(value, value)
    return bool(_with_type(value) == typed_default)


def _with_type(value: Any) -> Any:
    # `1 == True`, but they are different arguments
    return [_with_type(item) for item in value] if isinstance(value, list | tuple) else (type(value), value)


def _fits(value: Any, kind: Any, length: int | None = None) -> bool:
    name = kind.kind()
    if name == "OptionalType":
        return value is None or _fits(value, kind.getElementType(), length)
    if name == "ListType":
        inner = kind.getElementType()
        if isinstance(value, list | tuple):
            return all(_fits(item, inner) for item in value)
        return length is not None and _fits(value, inner)
    types = _TYPES.get(name)
    return types is None or (isinstance(value, types) and (type(value) is not bool or bool in types))


_TYPES: dict[str, tuple[type, ...]] = {
    "TensorType": (TensorSpec,),
    # schemas have dtypes, layouts and memory formats as integers
    "IntType": (int, torch.dtype, torch.layout, torch.memory_format),
    "SymIntType": (int,),
    "FloatType": (float, int),
    "ComplexType": (complex, float, int),
    "NumberType": (int, float, complex, bool),
    "BoolType": (bool,),
    "StringType": (str,),
    "DeviceObjType": (torch.device,),
    "GeneratorType": (GeneratorSpec,),
}


SPACES = ("special", "linalg", "fft")  # modules of torch whose functions are operators with the module's name as prefix


def operator_name(name: str) -> str:
    """Return the operator of a function, such as `aten::relu` for `torch.nn.functional.relu`."""
    if "::" in name:
        return name
    parts = name.removeprefix("torch.ops.").split(".")
    if not name.startswith("torch.") or name.startswith("torch.ops."):
        return "::".join((parts[0], ".".join(parts[1:]))) if len(parts) > 1 else name
    if len(parts) == 3 and parts[1] in SPACES:
        return f"aten::{parts[1]}_{parts[2]}"
    return f"aten::{parts[-1]}"


# in the order of c10::ScalarType, which only grows at its end
_SCALAR_TYPES = (
    *("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"),
    *("complex32", "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16", "quint4x2", "quint2x4"),
    *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
    *("float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "uint16", "uint32", "uint64"),
    *(f"uint{bits}" for bits in range(1, 8)),
    *(f"int{bits}" for bits in range(1, 8)),
    *("float8_e8m0fnu", "float4_e2m1fn_x2"),
)
_LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "_mkldnn", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged")
_MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")

DTYPE_OF_CODE = {code: DTYPES[name] for code, name in enumerate(_SCALAR_TYPES) if name in DTYPES}
LAYOUT_OF_CODE = {code: LAYOUTS[name] for code, name in enumerate(_LAYOUTS) if name in LAYOUTS}
MEMORY_FORMAT_OF_CODE = {code: MEMORY_FORMATS[name] for code, name in enumerate(_MEMORY_FORMATS)}
# values by the integer codes that the dispatcher uses for them, by type in a schema
VALUE_OF_CODE: dict[str, dict[int, Any]] = {
    "ScalarType": DTYPE_OF_CODE,
    "Layout": LAYOUT_OF_CODE,
    "MemoryFormat": MEMORY_FORMAT_OF_CODE,
}
CODE_OF_VALUE = {value: code for table in VALUE_OF_CODE.values() for code, value in table.items()}

# C++ names of element types as compilers on Linux write them
ELEMENT_NAMES: dict[torch.dtype, str] = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int64: "long int",
    torch.int32: "int",
    torch.int16: "short int",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.bool: "bool",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex32: "c10::complex<c10::Half>",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
    torch.uint16: "short unsigned int",
    torch.uint32: "unsigned int",
    torch.uint64: "long unsigned int",
    torch.qint8: "c10::qint8",
    torch.quint8: "c10::quint8",
    torch.qint32: "c10::qint32",
    **{dtype: f"c10::F{name[1:]}" for name, dtype in DTYPES.items() if name.startswith("float8")},
}
DTYPE_OF_ELEMENT: dict[str, torch.dtype] = {
    **{name: dtype for dtype, name in ELEMENT_NAMES.items()},
    # other compilers and C++ libraries
    "long": torch.int64,
    "long long": torch.int64,
    "short": torch.int16,
    "unsigned short": torch.uint16,
    "unsigned long": torch.uint64,
    "__int64": torch.int64,
    "char": torch.int8,
    "half": torch.float16,
    "c10::complex<half>": torch.complex32,
}
