"""Reader and writer of PARAM's operator configurations: JSON in which an entry describes many cases by ranges.

    {"torch.mm": {"input_iterator": "RangeConfigIterator", "input_data_generator": "PyTorch:DefaultDataGenerator",
      "config": [{"input": [{"args": [
        {"type": "tensor", "dtype": "float", "shape": [[128, 2048, 16], 256], "__range__": ["shape"]},
        {"type": "tensor", "dtype": "float", "shape": [256, 256]}]}]}]}}

Iterators, which expand one entry to many, and generators, which make arguments, are plug-ins.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import torch

from opgrip.errors import FormatError, one_line
from opgrip.traces.formats.building import NO_TIMES, RecordBuilder, converted
from opgrip.traces.formats.configurations.generators import (
    DTYPE_OF,
    GENERATOR,
    ArgumentDraw,
    Arguments,
    Generate,
    generators,
)
from opgrip.traces.formats.configurations.iterators import (
    ITERATOR,
    Expand,
    Listed,
    ValueChoices,
    chain,
    combinations,
    iterators,
)
from opgrip.traces.formats.configurations.modules import MetaRecording, Recorded, function_names, module_names
from opgrip.traces.formats.operator_schemas import (
    CODE_OF_VALUE,
    DTYPE_OF_CODE,
    LAYOUT_OF_CODE,
    MEMORY_FORMAT_OF_CODE,
    Bound,
    NotConverted,
    SchemaText,
    arguments_in_order,
    bind,
    operator_name,
    parse_schema,
    schemas_of,
    without_defaults,
)
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, Losses, formats
from opgrip.traces.schema.arguments import TensorSpec, tensors
from opgrip.traces.schema.json_values import device_name
from opgrip.traces.schema.records import Record, Scope, Signature
from opgrip.traces.schema.tensor_specs import contiguous
from opgrip.traces.table.trace import Trace


@dataclass(frozen=True, slots=True)
class SectionEntry:
    """One entry of a `build` or `input` section, after ranges and other macros were replaced by values.

    weight : number of values in the entry as it is written in the file
    """

    form: dict[str, Any] | None
    weight: int = 1
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class ConfigurationCase:
    op: str
    build: SectionEntry
    input: SectionEntry
    build_generator: Generate
    input_generator: Generate


@contextmanager
def reasons() -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"an entry cannot be read ({one_line(error)})") from error


class UnreadableCase(ValueError):
    def __init__(self, op: str, reason: str) -> None:
        super().__init__(reason)
        self.op = op


def _entries(form: Any, expand: Expand) -> ValueChoices:
    if not isinstance(form, dict):
        raise ValueError(f"an entry of a section is not a JSON object: {str(form)[:40]}")
    with reasons():
        choices = expand(form)
    weight, repeats = weight_of(form), form.get("count", 1)
    if type(repeats) is not int or repeats < 1:
        raise ValueError(f"the `count` of an entry is not a positive integer: {str(repeats)[:40]}")

    def at(index: int) -> SectionEntry:
        with reasons():
            return SectionEntry(choices.at(index), weight, repeats)

    return ValueChoices(choices.count, at)


def _made(op: str, losses: Losses, make: Callable[..., ValueChoices], *args: Any) -> list[ValueChoices]:
    try:
        return [make(*args)]
    except ValueError as error:
        losses.skip(op, str(error))
        return []


def _cases_of(op: str, info: Any, losses: Losses) -> ValueChoices:
    if not isinstance(info, dict) or not isinstance(info.get("config"), list):
        raise ValueError("its `config` is not a list")
    build_iterator = _named(iterators.get, info, "build_iterator", ITERATOR)
    input_iterator = _named(iterators.get, info, "input_iterator", ITERATOR)
    build_generator = _named(generators.get, info, "build_data_generator", GENERATOR)
    input_generator = _named(generators.get, info, "input_data_generator", GENERATOR)

    def pairs_of(config: Any) -> ValueChoices:
        if not isinstance(config, dict) or not isinstance(config.get("input"), list):
            raise ValueError("the `input` of a configuration is not a list")
        build = config.get("build")
        builds = _expanded(op, build, build_iterator, losses) if build else Listed([SectionEntry(None)])
        return combinations([builds, _expanded(op, config["input"], input_iterator, losses)])

    pairs = [part for config in info["config"] for part in _made(op, losses, pairs_of, config)]
    choices = chain(pairs)

    def at(index: int) -> ConfigurationCase:
        try:
            build, entry = choices.at(index)
        except ValueError as error:
            raise UnreadableCase(op, str(error)) from error
        return ConfigurationCase(op, build, entry, build_generator, input_generator)

    return ValueChoices(choices.count, at)


def _named(find: Any, info: dict[str, Any], key: str, default: str) -> Any:
    name = info.get(key) or default
    entry = find(name) if isinstance(name, str) else None
    if entry is None:
        raise ValueError(f"unknown {key}: {str(name)[:60]}")
    return entry


def _expanded(op: str, section: Any, expand: Expand, losses: Losses) -> ValueChoices:
    if not isinstance(section, list):
        raise ValueError(f"a `build` or `input` section is not a list: {str(section)[:40]}")
    return chain([part for form in section for part in _made(op, losses, _entries, form, expand)])


def weight_of(form: Any) -> int:
    weight, level = 0, [form]
    while level:
        weight += len(level)
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [child for items in inner for child in items]
    return weight


NAME = "param"
MOST_CASES = 20_000  # maximum number of cases of a file that are generated without a selection
MOST_VALUES = 5_000_000  # maximum number of values in the entries of all cases
MOST_CALLS = 1_000_000  # maximum sum of the counts in a file
MOST_BYTES = 64 << 20  # maximum size of a file in bytes; the whole file is kept in memory
MOST_ITEMS = 4 << 20  # maximum number of lists, objects and their members in a file
GENERATORS = re.compile(rb'"(?:build|input)_(?:data_generator|iterator)"\s*:')
SECTIONS = re.compile(rb'"config"\s*:\s*\[\s*\{\s*"(?:build|input)"\s*:\s*\[')
ONE_OPERATOR = re.compile(rb'"op_info"\s*:\s*\{')
VALUES = "values of tensors: drawn as the file's generators do, floats from 0 to 1 and integers from -10 to 9"
DEVICE = "devices of tensors: the file names them only in run_options, so they are on the processor"


def recognizes(head: Head) -> bool:
    is_object = head.start.lstrip().startswith(b"{")
    return is_object and any(pattern.search(head.start) for pattern in (GENERATORS, SECTIONS, ONE_OPERATOR))


def read(file: ForeignFile) -> Iterator[Record]:
    operators, device = _operators_of(file)
    losses = file.losses
    cases = chain([case for op, info in operators.items() for case in _made(op, losses, _cases_of, op, info, losses)])
    indices = file.indices(cases.count, MOST_CASES)
    builder = RecordBuilder(NAME, file.losses, {"cases": cases.count})
    recording = MetaRecording(device, file.unbounded)
    weight = calls = 0
    for index in indices:
        try:
            case: ConfigurationCase = cases.at(index)
        except UnreadableCase as error:
            file.losses.skip(error.op, str(error))
            continue
        weight += case.build.weight + case.input.weight
        draw = ArgumentDraw(random.Random(index), device, builder.add_values)
        case_calls: list[Recorded] = []
        with builder.skipping(case.op, case.input.repeats):
            build = None if case.build.form is None else _arguments(case.build, case.build_generator, draw)
            arguments = _arguments(case.input, case.input_generator, draw)
            case_calls += calls_of(case.op, build, arguments, recording)
        calls += case.input.repeats * len(case_calls)
        if (weight > MOST_VALUES or calls > MOST_CALLS) and not file.unbounded:
            raise file.refusal(f"its cases have more than {MOST_VALUES:,} arguments, or {MOST_CALLS:,} calls")
        for place, call in enumerate(case_calls):
            scope = Scope(0, call.module, call.module_type, "forward")
            # the number does not depend on which cases are read, unless an equal one is among them
            number = index + place * cases.count
            builder.add_call(call.op, call.args, call.kwargs, count=case.input.repeats, scope=scope, number=number)
        yield from builder.ready()
    yield from builder.end()


def _arguments(entry: SectionEntry, generate: Generate, draw: ArgumentDraw) -> Arguments:
    assert entry.form is not None, "it was looked at"
    with reasons():
        return generate(entry.form, draw)


def _operators_of(file: ForeignFile) -> tuple[dict[str, Any], str]:
    form = file.parse(file.content(MOST_BYTES), MOST_ITEMS)
    if not isinstance(form, dict):
        raise file.damage("it is not a JSON object of operators")
    if "op_name" not in form or "op_info" not in form:
        return form, "cpu"
    options = form.get("run_options")
    device = options.get("device") if isinstance(options, dict) else None
    try:
        return {str(form["op_name"]): form["op_info"]}, device_name(device or "cpu")
    except FormatError as error:
        raise file.damage(str(error)) from error


# values by their integer codes in TorchScript, by parameter name
CODES: dict[str, dict[int, Any]] = {
    "dtype": DTYPE_OF_CODE,
    "layout": LAYOUT_OF_CODE,
    "memory_format": MEMORY_FORMAT_OF_CODE,
}


def calls_of(name: str, build: Arguments | None, arguments: Arguments, recording: MetaRecording) -> Iterator[Recorded]:
    """Yield the operators that one case of a configuration calls.

    build : arguments of a module's constructor, or an operator's schema as text
    """
    if name in module_names():
        yield from recording.module(name, build or Arguments(), arguments)
        return
    schema = _schema_of(build)
    if schema is not None:
        yield _call(_bind_by_text(schema, arguments))
        return
    operator = operator_name(name)
    try:
        yield _call(_with_types(bind(operator, arguments.args, arguments.kwargs)))
    except NotConverted:
        if not name.startswith("torch.") or name not in function_names():
            raise
        yield from recording.function(name, arguments)


def _call(bound: Bound) -> Recorded:
    return Recorded(bound.op, bound.args, bound.kwargs)


def _schema_of(build: Arguments | None) -> SchemaText | None:
    if build is None or not (build.args or build.kwargs):
        return None
    text = next(iter((*build.args, *build.kwargs.values())))
    if not isinstance(text, str):
        raise ValueError(f"the entry names no module, and its `build` is not an operator schema: {str(text)[:40]}")
    schema = parse_schema(text)
    if schema is None:
        raise ValueError(f"the build section is not an operator schema: {text[:60]!r}")
    return schema


def _bind_by_text(schema: SchemaText, arguments: Arguments) -> Bound:
    if len(arguments.args) > len(schema.names):
        raise NotConverted(f"{schema.name} takes {len(schema.names)} arguments, not {len(arguments.args)}")
    named = dict(zip(schema.names, arguments.args, strict=False))
    if not set(named).isdisjoint(arguments.kwargs):
        raise NotConverted(f"{schema.name} has an argument by position and by name")
    try:
        name = schema.name if "." in schema.name else f"{schema.name}.default"
        bound = bind(name, (), named | arguments.kwargs)
    except NotConverted as first:
        try:
            # text from another version may use other parameter names
            bound = bind(schema.name.partition(".")[0], arguments.args, arguments.kwargs)
        except NotConverted:
            raise first from None
    return without_defaults(_with_types(bound))


def _with_types(bound: Bound) -> Bound:
    (schema,) = schemas_of(bound.op)[:1]
    names = [parameter.name for parameter in schema.arguments]
    args = tuple(_typed(name, value) for name, value in zip(names, bound.args, strict=False))
    return Bound(bound.op, args, {name: _typed(name, value) for name, value in bound.kwargs.items()})


def _typed(name: str, value: Any) -> Any:
    types = CODES.get(name.removeprefix("out_"))
    if types is None or type(value) is not int:
        return value
    if value not in types:
        raise ValueError(f"unknown {name} with the number {value}")
    return types[value]


NAME_OF = {dtype: name for name, dtype in DTYPE_OF.items()}
# pattern of alias sets in a schema; they are removed because some readers cannot parse `Tensor(a -> *)`
ALIAS = re.compile(r"(?<=Tensor)\([^)]*\)")
SYMBOLIC = "SymInt"  # the dispatcher's type of integers, which TorchScript calls `int`


def write(trace: Trace, file: IO[bytes], losses: Losses) -> None:
    """Write operators in alphabetical order, with a configuration per overload and an entry per list of arguments."""
    # by name, schema and arguments: signatures that differ only in metadata that the format lacks share an entry
    entries: dict[str, dict[str, Counter[str]]] = {}
    for signature, (schema, args), calls in converted(trace, losses, _entry_of):
        name = schema.partition("(")[0].partition(".")[0]
        entries.setdefault(name, {}).setdefault(schema, Counter())[args] += len(calls)
        lost = ", ".join(_lost(signature))
        for call in calls.index:
            losses.lose(int(call), signature.op, lost)
    file.write(b"{")
    for index, (name, configs) in enumerate(sorted(entries.items())):
        file.write(b",\n" if index else b"\n")
        file.write(f"{json.dumps(name)}: ".encode())
        file.write(json.dumps(_operator(configs), indent=1).encode())
    file.write(b"\n}\n")


def _operator(configs: dict[str, Counter[str]]) -> dict[str, Any]:
    sections = []
    for schema, inputs in configs.items():
        build = [{"args": [{"type": "str", "value": schema}]}]
        entries = [
            {"args": json.loads(args), **({"count": count} if count > 1 else {})} for args, count in inputs.items()
        ]
        sections.append({"build": build, "input": entries})
    return {"build_data_generator": GENERATOR, "input_data_generator": GENERATOR, "config": sections}


def _entry_of(signature: Signature) -> tuple[str, str]:
    _, schema, values = arguments_in_order(signature)
    args = [_form(parameter.name, value) for parameter, value in zip(schema.parameters, values, strict=True)]
    return schema.text(lambda kind: ALIAS.sub("", kind).replace(SYMBOLIC, "int")), json.dumps(args)


def _form(name: str, value: Any) -> dict[str, Any]:
    match value:
        case None:
            return {"type": "none"}
        case bool():
            return {"type": "bool", "value": value}
        case int():
            return {"type": "int", "value": value}
        case float():
            return {"type": "float", "value": value}
        case str():
            return {"type": "str", "value": value}
        case torch.device():
            return {"type": "device", "value": str(value)}
        case torch.dtype() | torch.layout() | torch.memory_format():
            return _code(name, value)
        case list() | torch.Size():
            return {"type": "genericlist", "value": [_form("", item) for item in value]}
        case tuple():
            return {"type": "tuple", "value": [_form("", item) for item in value]}
        case TensorSpec(layout=torch.strided, made_of=None, cls=None, dtype=dtype) if dtype in NAME_OF:
            about = {"type": "tensor", "dtype": NAME_OF[dtype], "shape": list(value.shape)}
            return {**about, "requires_grad": value.requires_grad}
        case TensorSpec(layout=torch.strided, made_of=None, cls=None):
            raise ValueError(f"the format has no tensors of {str(value.dtype).removeprefix('torch.')}")
    raise ValueError(f"the format cannot represent a value of type {type(value).__name__}")


def _code(name: str, value: Any) -> dict[str, Any]:
    if value in CODES.get(name.removeprefix("out_"), {}).values():
        return {"type": "int", "value": CODE_OF_VALUE[value], "name": name}
    raise ValueError(f"the format has no code for {value}")


def _lost(signature: Signature) -> Iterator[str]:
    yield "time and place in the program"
    specs = list(tensors([signature.args, signature.kwargs]))
    if any(spec.stride != contiguous(spec.shape) or spec.offset for spec in specs):
        yield "strides"
    if any(spec.device != "cpu" for spec in specs):
        yield "devices"
    if any(spec.storage is not None for spec in specs):
        yield "shared memory"
    if any(spec.values is not None for spec in specs):
        yield "values"


formats.register(NAME)(
    Format(
        "PARAM's operator configurations: JSON",
        recognizes,
        read,
        write,
        suffixes=(".param.json",),
        defaults=(NO_TIMES, VALUES, DEVICE),
        has_cases=True,
        is_collection=True,
    )
)
