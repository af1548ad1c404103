"""Operator configurations of PARAM, JSON: arguments by type, shape and range, which stand for many cases.

    {"torch.mm": {"input_iterator": "RangeConfigIterator", "input_data_generator": "PyTorch:DefaultDataGenerator",
      "config": [{"input": [{"args": [
        {"type": "tensor", "dtype": "float", "shape": [[128, 2048, 16], 256], "__range__": ["shape"]},
        {"type": "tensor", "dtype": "float", "shape": [256, 256]}]}]}]}}

Iterators, which expand macros, and generators, which make arguments, are found by their names; see
`opgrip.traces.formats.configurations`. Cases are numbered, and each is computed by its number when it is asked for.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from opgrip.errors import FormatError
from opgrip.traces.formats.building import NO_TIMES, RecordBuilder
from opgrip.traces.formats.configurations.generators import Arguments, Draw, Generate
from opgrip.traces.formats.configurations.modules import Recorded, Recording
from opgrip.traces.formats.configurations.plan import Case, Entry, UnreadableCase, plan_of, reasons
from opgrip.traces.formats.configurations.value_choices import Choices
from opgrip.traces.formats.param_writing import calls_of, write
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, formats
from opgrip.traces.schema.json_values import device_name
from opgrip.traces.schema.records import Record, Scope

NAME = "param"
MOST_CASES = 20_000
"""Of a file that are made, before a part of them has to be chosen."""
MOST_VALUES = 5_000_000
"""Values in the entries of all cases that are made."""
MOST_CALLS = 1_000_000
"""That the entries of a file count."""
MOST_BYTES = 64 << 20
"""Of a file, which is in memory as a whole."""
MOST_ITEMS = 4 << 20
"""Of a file: lists, objects, and what stands in them."""
GENERATORS = re.compile(rb'"(?:build|input)_(?:data_generator|iterator)"\s*:')
SECTIONS = re.compile(rb'"config"\s*:\s*\[\s*\{\s*"(?:build|input)"\s*:\s*\[')
ONE_OPERATOR = re.compile(rb'"op_info"\s*:\s*\{')
VALUES = "values of tensors: drawn as the file's generators do, floats from 0 to 1 and whole numbers from -10 to 9"
DEVICE = "devices of tensors: the file has none but in run_options, so they are on the processor"


def recognizes(head: Head) -> bool:
    """Whether a file begins as an object of configurations."""
    if not head.start.lstrip().startswith(b"{"):
        return False
    return any(pattern.search(head.start) for pattern in (GENERATORS, SECTIONS, ONE_OPERATOR))


def read(file: ForeignFile) -> Iterator[Record]:
    """The calls of the file's cases, or of those that are asked for."""
    operators, device = _operators_of(file)
    cases = plan_of(operators, file.losses)
    places = file.places(cases.count, MOST_CASES)
    builder = RecordBuilder(NAME, file.losses, {"cases": cases.count})
    recording = Recording(device, file.unbounded)
    weight = calls = 0
    for place in places:
        case = _case_at(cases, place, file)
        if case is None:
            continue
        weight += case.build.weight + case.input.weight
        case_calls = _calls_of(case, Draw(random.Random(place), device, builder.add_values), recording, file)
        calls += case.input.repeats * len(case_calls)
        if (weight > MOST_VALUES or calls > MOST_CALLS) and not file.unbounded:
            raise file.refusal(f"its cases have more than {MOST_VALUES:,} arguments, or {MOST_CALLS:,} calls")
        for call in case_calls:
            scope = Scope(0, call.module, call.module_type, "forward")
            builder.add_call(call.op, call.args, call.kwargs, count=case.input.repeats, scope=scope)
        yield from builder.ready()
    yield from builder.end()


def _case_at(cases: Choices, place: int, file: ForeignFile) -> Case | None:
    try:
        case: Case = cases.at(place)
    except UnreadableCase as error:
        file.losses.skip(error.op, str(error))
        return None
    return case


def _calls_of(case: Case, draw: Draw, recording: Recording, file: ForeignFile) -> list[Recorded]:
    """The calls of a case; none, and a reason counted, where there is no such operator or its arguments are none."""
    try:
        build = None if case.build.form is None else _arguments(case.build, case.build_generator, draw)
        arguments = _arguments(case.input, case.input_generator, draw)
        return list(calls_of(case.op, build, arguments, recording))
    except ValueError as error:
        file.losses.skip(case.op, str(error), case.input.repeats)
        return []


def _arguments(entry: Entry, generate: Generate, draw: Draw) -> Arguments:
    assert entry.form is not None, "it was looked at"
    with reasons():
        return generate(entry.form, draw)


def _operators_of(file: ForeignFile) -> tuple[dict[str, Any], str]:
    """The operators' configurations by name, and the device to run them on."""
    size = 0
    pieces = []
    for chunk in file.chunks():
        size += len(chunk)
        if size > MOST_BYTES and not file.unbounded:
            raise file.refusal(f"it holds more than {MOST_BYTES >> 20} MB")
        pieces.append(chunk)
    form = file.parse(b"".join(pieces), MOST_ITEMS)
    if not isinstance(form, dict):
        raise file.damage("it is no object of operators")
    if "op_name" not in form or "op_info" not in form:
        return form, "cpu"
    options = form.get("run_options")
    device = options.get("device") if isinstance(options, dict) else None
    try:
        return {str(form["op_name"]): form["op_info"]}, device_name(device or "cpu")
    except FormatError as error:
        raise file.damage(str(error)) from error


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
