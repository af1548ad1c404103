"""Untrusted traces, value models and sample folders: they are refused in one line, or read in bounded memory."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz.consumers import CONSUMERS, consume
from hypothesis import given, settings
from hypothesis import strategies as st

from opgrip.errors import UserError
from opgrip.traces.io.sample_folder import open_sample
from opgrip.traces.schema.arguments import FormatError
from opgrip.traces.values import fit, value_model_from_json, value_model_to_json, value_models

ESCAPE, TURN, SURROGATE = "\x1b[31m", "\u202e", "\ud800"
STRANGE = f"a{ESCAPE}{TURN}{SURROGATE}\x07"
HUGE = {"shape": [2**62] * 2, "stride": [2**62, 1], "dtype": "complex128", "device": "cpu", "offset": 2**62}

HEADER: dict[str, Any] = {"type": "header", "format": "opgrip-trace", "version": "1.3"}
TENSOR = {"tensor": {"shape": [2], "stride": [1], "dtype": "float32", "device": "cpu"}}
SIGNATURE: dict[str, Any] = {
    "type": "signature",
    "id": 0,
    "kind": "operator",
    "op": "aten.relu.default",
    "args": [TENSOR],
}
ON_DEVICE = SIGNATURE | {"args": [{"tensor": TENSOR["tensor"] | {"device": "cuda:99"}}]}
KERNELS = {"type": "kernels", "signature": 0, "names": [STRANGE], "launches": [1], "device_ns": [9]}
SCOPE = {"type": "scope", "id": 0, "module": "m", "module_type": "M", "phase": "forward", "function": "f", "file": "a"}
CALLS: dict[str, Any] = {
    "type": "calls",
    "thread": 0,
    "start_ns": 0,
    "signature": [0] * 3,
    "scope": [0] * 3,
    "after_ns": [0, 9, 9],
    "duration_ns": [5] * 3,
    "tensors": [1] * 3,
    "newest": -1,
    "storages": [1, 0, 0],
}
END: dict[str, Any] = {"type": "end", "calls": 3, "signatures": 1, "duration_ns": 30, "dropped": []}
PLACED = {"type": "observed", "signature": 0, "values": [None], "outputs": TENSOR, "since_ns": 0}
ENTERED = {"type": "entered", "thread": 0, "start_ns": 99, "scope": 0, "signature": 9}
LOST = [{"op": STRANGE, "reason": STRANGE, "count": 1}]

TRACES: dict[str, list[dict[str, Any]]] = {
    "header of other types": [
        HEADER | {"model": {"name": [1]}, "processes": [1], "devices": [1], "command": {"a": 1}, "page_size": "x"},
        *(SIGNATURE, SCOPE, CALLS, END),
    ],




    "texts of a header": [
        HEADER | {"devices": {"cpu": [STRANGE]}, "command": [STRANGE], "model": {"name": STRANGE}},
        *(SIGNATURE, SCOPE, CALLS, END),
    ],
    "texts of a signature": [
        HEADER,
        SIGNATURE | {"op": STRANGE, "args": [STRANGE, {"opaque": STRANGE}], "kwargs": {STRANGE: STRANGE}},
        SCOPE | {"module": STRANGE, "function": STRANGE, "file": STRANGE},
        *({"type": "thread", "id": 0, "name": STRANGE}, {"type": STRANGE}, CALLS, END),
    ],
    "texts of what was lost": [
        *(HEADER, SIGNATURE | {"raised": STRANGE}, SCOPE, CALLS),
        ENTERED | {"opened": {**SIGNATURE, "op": STRANGE}},
        END | {"stopped": STRANGE, "dropped": LOST, "without_values": LOST, "passed_by": LOST},
    ],
    "huge numbers": [
        *(HEADER, SIGNATURE | {"args": [{"tensor": HUGE}, 10**4000], "outputs": {"tensor": HUGE}}, SCOPE),
        *(CALLS | {"start_ns": 2**61, "duration_ns": [2**61, 2**61 + 9, 0]}, END | {"calls": -(2**63)}),
    ],
    "calls long before and after all others": [
        *(HEADER, SIGNATURE, SCOPE, CALLS | {"start_ns": -(2**62), "after_ns": [0, 2**62, 2**62 - 5]}, END),
    ],
    "huge numbers of accelerators": [
        HEADER | {"accelerator": {"devices": {"cuda:0": {"memory_bytes": 10**400, "power_limit_w": 10**400}}}},
        *(SIGNATURE, SCOPE, CALLS, END | {"accelerator": {"devices": {"cuda:0": {"max_sm_mhz": -(10**400)}}}}),
    ],
    "an accelerator of other types": [
        HEADER | {"accelerator": {"devices": [1], "libraries": 5, "settings": {"": [STRANGE, [None]], "_bytes": True}}},
        *(SIGNATURE, SCOPE, CALLS, END | {"accelerator": {"devices": {STRANGE: {STRANGE: [STRANGE]}}}}),
    ],

    "places whose calls have no tensors": [
        *(HEADER, SIGNATURE, SCOPE, PLACED, PLACED | {"since_ns": 9}),
        *(CALLS | {"tensors": [1, 0, 0], "storages": [0], "duration_ns": [5, 900, 5]}, END),
    ],

    "places of what the trace lacks": [
        *(HEADER, SIGNATURE, SCOPE, PLACED | {"signature": 7}, PLACED | {"values": [7]}),
        *(PLACED | {"values": [None, 1]}, PLACED | {"since_ns": 2**63 - 1}, CALLS, END),
    ],
    "kernels": [
        *(HEADER, ON_DEVICE, SCOPE, CALLS | {"device_ns": [1, -(2**63), 2**63 - 1], "streams": [-1, 2**63 - 1, 0]}),
        KERNELS,
        KERNELS | {"signature": -5, "launches": [2**63 - 1], "device_ns": [2**63 - 1]},
        {"type": "device_times", "thread": 0, "first": 2**63 - 1, "device_ns": [1]},
        {"type": "device_times", "thread": -1, "first": 0, "device_ns": [2**63 - 1] * 9},
        END,
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.slow
def test_hostile_trace_is_read_or_refused_by_all_consumers(tmp_path: Path, name: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in TRACES[name]), encoding="utf-8")
    read_by_all(path)


@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity"])
@pytest.mark.parametrize(
    "line", [HEADER | {"started_unix_ns": "X"}, {"type": "context", "id": 0, "settings": {"a": "X"}}]
)
def test_numbers_that_no_file_can_hold_are_refused(tmp_path: Path, line: dict[str, Any], number: str) -> None:
    path = tmp_path / "t.jsonl"
    lines = [line] if line["type"] == "header" else [HEADER, line]
    text = "".join(json.dumps(item) + "\n" for item in [*lines, SIGNATURE, SCOPE, CALLS, END])
    path.write_text(text.replace('"X"', number), encoding="utf-8")
    read_by_all(path, lambda consumer: "merge" in consumer.__name__ or "info" in consumer.__name__)


def read_by_all(path: Path, chosen: Callable[[Any], bool] = lambda consumer: True) -> None:
    for consumer in CONSUMERS:
        if chosen(consumer):
            consume(path, consumer)


GOOD = {"name": "s", "entry": "f", "file": "code.py", "classes": {}, "source": {"module": "m", "qualname": "f"}}


def written(folder: Path, text: str) -> Path:
    (folder / "code.py").write_text("class A:\n    pass\n\ndef f(x):\n    return x\n")
    (folder / "code.txt").write_text("def f(x):\n    return x\n")
    (folder / "sample.json").write_text(text)
    return folder


def test_classes_are_named_as_in_the_calls(tmp_path: Path) -> None:
    sample = open_sample(written(tmp_path, json.dumps(GOOD | {"classes": {"m:A": "A"}})))
    assert sample.function(3) == 3
    assert sample.classes["m:A"] is sample.classes["A"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"file": "code.txt"}, "file as the name of a .py file"),
        ({"file": "/etc/code.py"}, "file as the name of a .py file"),
        ({"file": "../code.py"}, "file as the name of a .py file"),
        ({"file": "none.py"}, "FileNotFoundError"),
        ({"classes": []}, "classes as texts"),
        ({"classes": {"m:A": "Nope"}}, "has no attribute 'Nope'"),
        ({"entry": None}, "entry as a text"),
        ({"entry": "f.g.h"}, "AttributeError"),
        ({"source": []}, "source as an object"),
        ({"source": {}}, "KeyError"),
    ],
)
def test_field_of_another_type_is_reported_in_one_line(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        open_sample(written(tmp_path, json.dumps(GOOD | changes)))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["[" * 200_000, "[]", "5", ""])
def test_file_that_is_not_a_sample_is_reported_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="is not a sample"):
        open_sample(written(tmp_path, text))


def test_huge_sample_file_is_not_read(tmp_path: Path) -> None:
    written(tmp_path, json.dumps(GOOD))
    with (tmp_path / "sample.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="is larger than 1 MB"):
        open_sample(tmp_path)


HUGE_NUMBERS = [2**31, 2**62, 2**63 - 1, 2**63, 2**70, 10**400, -1, -(2**63), -(2**64)]
ODD: list[Any] = [
    None,
    True,
    "text",
    [],
    [[]],
    0,
    0.0,
    -1.5,
    1e300,
    {"float": "nan"},
    {"float": "inf"},
    {"dtype": "float32"},
    {"opaque": "x"},
    {"dict": [["a", 1]]},
    *HUGE_NUMBERS,
]


def examples() -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(100, 2, generator=generator) * 100
    factor = torch.randn(20, 20, generator=generator)
    tensors = [
        torch.tensor([1.5, 2.5]),
        torch.full((100,), 3),
        torch.eye(20),
        torch.rand(100, generator=generator) < 0.4,
        torch.arange(100),
        torch.randperm(100, generator=generator),
        torch.randint(0, 9, (100,), generator=generator).cumsum(0),
        torch.randint(0, 500, (500,), generator=generator),
        torch.randn(20, 20, generator=generator).softmax(-1),
        torch.cat([corners, corners + 9], dim=1),
        torch.rand(500, generator=generator).log(),
        factor @ factor.mT + torch.eye(20),
        factor.triu() + 5 * torch.eye(20),
    ]
    forms = {}
    for tensor in tensors:
        asked = () if bool((tensor == torch.eye(20)).all() if tensor.shape == (20, 20) else False) else ("triangular",)
        model = fit(tensor, requested_kinds=(*asked, "factorable") if asked else ())
        assert model is not None
        form = value_model_to_json(model)
        forms[form["model"]] = form
    forms["integers"] |= {"total": 1000}
    forms["floats"] |= {"distinct": 30, "denormals": 0.1}
    forms["boxes"] |= {"groups": 7, "overlap": 3.0}
    forms["probabilities"] |= {"denormals": 0.1, "zeros": 0.2}
    return forms


EXAMPLES = examples()
SHAPES = [(70, 4), (1,), (), (3, 5, 7), (500,), (2, 20, 20)]
DTYPES = [torch.float32, torch.int64, torch.uint8, torch.bool, torch.float16, torch.float64, torch.complex64]


def test_every_model_has_an_example() -> None:
    assert set(EXAMPLES) == set(value_models.names())


def draw_or_refuse(form: dict[str, Any], shape: tuple[int, ...] = (70, 4), dtype: torch.dtype = torch.float32) -> None:
    try:
        model = value_model_from_json(json.loads(json.dumps(form)))
    except FormatError:
        return
    values = model.draw(shape, dtype, torch.Generator())
    assert values.shape == shape
    assert values.dtype == dtype


@pytest.mark.parametrize("name", EXAMPLES)
def test_field_of_another_type_is_refused_or_drawn(name: str) -> None:
    form = EXAMPLES[name]
    for field, odd in itertools.product(form.keys() - {"model"}, ODD):
        draw_or_refuse(form | {field: odd})
        value = form[field]
        if isinstance(value, list):
            for at in {0, len(value) // 2, len(value) - 1}:
                draw_or_refuse(form | {field: [*value[:at], odd, *value[at + 1 :]]})
                if isinstance(value[at], list):
                    draw_or_refuse(form | {field: [*value[:at], [value[at][0], odd], *value[at + 1 :]]})
                    draw_or_refuse(form | {field: [*value[:at], [odd, *value[at][1:]], *value[at + 1 :]]})


@given(st.sampled_from(sorted(EXAMPLES)), st.data(), st.sampled_from(SHAPES), st.sampled_from(DTYPES))
@settings(max_examples=100)
def test_inconsistent_fields_are_refused_or_drawn(
    name: str, data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    form = dict(EXAMPLES[name])
    fields = [field for field in form if field != "model"]
    for field in data.draw(st.lists(st.sampled_from(fields), max_size=3)):
        value = form[field]
        if type(value) in (int, float):
            form[field] = data.draw(st.one_of(st.sampled_from(HUGE_NUMBERS), st.integers(-3, 500), st.floats(-2, 2)))
        elif isinstance(value, list):
            form[field] = value[: data.draw(st.integers(0, len(value)))]
    draw_or_refuse(form, shape, dtype)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_model_is_drawn_for_any_shape_and_dtype(name: str) -> None:
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        draw_or_refuse(EXAMPLES[name], shape, dtype)


@pytest.mark.parametrize(
    "form",
    [
        {"model": "nothing"},
        {},
        {"model": "exact", "data": []},
        {"model": "exact", "data": [2**64]},
        {"model": "booleans", "true": 5, "total": 3},
        {"model": "booleans", "true": 3, "total": 5, "runs": 4},
        {"model": "integers", "frequent": [], "low": None, "high": None, "others": 0, "ascending": False},
        {"model": "integers", "frequent": [[1, 2**62], [2, 2**62]], "low": 5, "high": 9, "others": 0, "ascending": 0},
        {"model": "boxes", "first": 0, "low": [0], "high": [1], "whole": [True]},
        {"model": "permutation", "low": 3, "high": 2},
        {"model": "progression", "start": 2**62, "step": 2**62, "repeats": 1, "period": 9},
        {"model": "offsets", "first": 5, "last": 4, "count": 3, "empty": 0, "lengths": [[1, 3]]},
        {"model": "offsets", "first": 0, "last": 4, "count": 3, "empty": 0},
        {"model": "factorable", "diagonal": 0.0, "spread": 1.0},
        {"model": "probabilities", "peak": 1.5, "zeros": 0.0},
    ],
)
def test_model_that_cannot_be_drawn_is_refused(form: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        value_model_from_json(form)


@pytest.mark.parametrize(
    "form",
    [
        {"model": "booleans", "true": 2**62, "total": 2**63 - 1, "runs": 2**61},
        {"model": "integers", "frequent": [[1, 2**61]], "low": 5, "high": 2**62, "others": 2**61, "ascending": False},
        {"model": "permutation", "low": -(2**63), "high": 2**63 - 1},
        {"model": "progression", "start": 0, "step": 1, "repeats": 2**62, "period": 2**62},
        {"model": "offsets", "first": 0, "last": 2**62, "count": 2**62, "empty": 0, "lengths": [[1, 2**62]]},
        {"model": "one_hot", "classes": 2**62, "frequent": [[5, 2**60]], "others": 2**60},
        EXAMPLES["boxes"] | {"groups": 2**62, "low": [-1e15] * 2 + [0] * 2, "high": [1e15] * 4, "quantiles": None},
        EXAMPLES["floats"] | {"distinct": 2**62},
        EXAMPLES["integers"] | {"distinct": 2**62, "zipf": 16},
    ],
    ids=lambda form: form["model"],
)
def test_huge_counts_allocate_nothing(form: dict[str, Any]) -> None:
    model = value_model_from_json(form)
    assert model.draw((300,), torch.float64, torch.Generator()).numel() == 300
