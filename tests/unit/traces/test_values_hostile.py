"""Value models in untrusted files: they are rejected, or drawn from in bounded memory."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opgrip.traces.schema.arguments import FormatError
from opgrip.traces.values import fit, value_model_from_json, value_model_to_json, value_models

HUGE = [2**31, 2**62, 2**63 - 1, 2**63, 2**70, 10**400, -1, -(2**63), -(2**64)]
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
    *HUGE,
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
@settings(deadline=None, max_examples=100)
def test_inconsistent_fields_are_refused_or_drawn(
    name: str, data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    form = dict(EXAMPLES[name])
    fields = [field for field in form if field != "model"]
    for field in data.draw(st.lists(st.sampled_from(fields), max_size=3)):
        value = form[field]
        if type(value) in (int, float):
            form[field] = data.draw(st.one_of(st.sampled_from(HUGE), st.integers(-3, 500), st.floats(-2, 2)))
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
