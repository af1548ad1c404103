"""Arguments of operators: their round trip through a file, and live ones made from untrusted specs only."""

import collections
import dataclasses
import json
import math
import struct
import types
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opgrip.traces import UserError
from opgrip.traces.rebuild import make_arguments
from opgrip.traces.schema.arguments import (
    DTYPES,
    LAYOUTS,
    MEMORY_FORMATS,
    FormatError,
    GeneratorSpec,
    Opaque,
    TensorSpec,
    decode,
    encode,
    leaves,
    map_leaves,
    numbers_of,
    with_numbers,
)
from opgrip.traces.schema.python_objects import (
    ArraySpec,
    ModuleSpec,
    NamedSpec,
    ObjectSpec,
    SameSpec,
    ScalarSpec,
    SharedSpec,
)

sizes = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
shapes_and_strides = st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), max_size=4).flatmap(
    lambda pairs: st.tuples(
        st.just(tuple(size for size, _ in pairs)),
        st.one_of(st.none(), st.just(tuple(step for _, step in pairs))),
    )
)
specs = st.builds(
    lambda geometry, **rest: TensorSpec(*geometry, **rest),
    shapes_and_strides,
    dtype=st.sampled_from(list(DTYPES.values())),
    device=st.sampled_from(["cpu", "cuda:0", "npu:3", "meta"]),
    layout=st.sampled_from(list(LAYOUTS.values())),
    offset=st.integers(0, 2**40),
    requires_grad=st.booleans(),
    storage=st.one_of(st.none(), st.integers(0, 9)),
    values=st.one_of(st.none(), st.integers(0, 999)),
    conj=st.booleans(),
    neg=st.booleans(),
    cls=st.one_of(st.none(), st.text(max_size=8)),
    pinned=st.booleans(),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(allow_nan=True),
    st.text(),
    st.sampled_from(list(DTYPES.values())),
    st.sampled_from(list(LAYOUTS.values())),
    st.sampled_from(list(MEMORY_FORMATS.values())),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")]),
    st.builds(GeneratorSpec, st.sampled_from(["cpu", "cuda:0"]), st.integers(-(2**63), 2**64 - 1)),
    st.builds(Opaque, st.text(max_size=20)),
    sizes.map(torch.Size),
    specs,
    st.binary(max_size=9),
    st.just(...),
    st.builds(range, *[st.integers(-9, 9)] * 2, st.integers(1, 9)),
    st.builds(slice, *[st.none() | st.integers(-(2**62), 2**62)] * 3),
    st.sets(st.text(max_size=3) | st.integers(), max_size=3),
    st.frozensets(st.floats(allow_nan=False) | st.booleans(), max_size=3),
    st.builds(ArraySpec, specs),
    st.builds(ScalarSpec, st.text(max_size=9), st.booleans() | st.integers() | st.floats() | st.complex_numbers()),
    st.builds(NamedSpec, st.text(max_size=9)),
    st.builds(SameSpec, st.integers(0, 9)),
)
keys = st.one_of(
    st.text(max_size=5), st.integers(), st.none(), st.floats(allow_nan=False), st.tuples(st.integers(), st.text())
)


def fields(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.text(max_size=5), inner, max_size=3)


arguments = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.builds(ObjectSpec, st.text(max_size=9), fields(inner), inner),
        st.builds(ModuleSpec, st.text(max_size=9), *[fields(inner)] * 4),
        st.builds(SharedSpec, st.integers(0, 9), inner),
    ),
    max_leaves=12,
)


def exactly(value: object) -> object:
    """Return a form in which 1, 1.0 and True differ, 0.0 and -0.0 differ, and nan equals nan."""
    if isinstance(value, float):
        return ("float", "nan" if math.isnan(value) else struct.pack("d", value))
    if isinstance(value, complex):
        return ("complex", exactly(value.real), exactly(value.imag))
    if isinstance(value, torch.Size):
        return ("size", tuple(value))
    if isinstance(value, list | tuple):
        return (type(value), [exactly(item) for item in value])
    if isinstance(value, dict):
        return (dict, [(exactly(key), exactly(item)) for key, item in value.items()])
    if isinstance(value, set | frozenset):
        return (type(value), sorted(map(repr, map(exactly, value))))
    if isinstance(value, ObjectSpec | ModuleSpec | SharedSpec | ScalarSpec):
        return (type(value), [exactly(getattr(value, field.name)) for field in dataclasses.fields(value)])
    return (type(value), value)


@given(arguments)
def test_any_argument_survives_encoding_and_decoding(value: object) -> None:
    text = json.dumps(encode(value), allow_nan=False)
    assert exactly(decode(json.loads(text))) == exactly(value)


@given(arguments)
def test_leaves_are_found_and_replaced_in_order(value: object) -> None:
    found = list(leaves(value))
    met: list[object] = []
    same = map_leaves(lambda leaf: met.append(leaf) or leaf, value)
    assert exactly(same) == exactly(value)
    # a size is one value, but its numbers are found one by one
    sizes = [item for leaf in met for item in (leaf if isinstance(leaf, torch.Size) else (leaf,))]
    assert list(map(exactly, sizes)) == list(map(exactly, found))
    numbers = numbers_of(value)
    assert exactly(with_numbers(value, numbers)) == exactly(value)


def test_unknown_dtype_is_kept_by_name() -> None:
    form = {"tensor": {"shape": [2], "stride": [1], "dtype": "float2_e9", "device": "cpu"}}
    assert decode(form) == Opaque("float2_e9 tensor")


@pytest.mark.parametrize(
    "form",
    [
        {"unknown": 1},
        {"float": "1.5"},
        {"float": 1, "int": 2},
        {"complex": [1]},
        {"object": {"class": 1, "fields": {}}},
        {"numpy": 1},
        {"numpy_scalar": {"dtype": "float32", "value": "1"}},
        {"shared": {"id": -1, "value": 1}},
        {"set": [[1]]},
        {"slice": [1, 2, 1.5]},
        {"range": [0, 9, 0]},
        {"bytes": "é"},
        {"tensor": {"shape": [2]}},
        {"tensor": {"shape": [-1], "stride": [1], "dtype": "float32", "device": "cpu"}},
        {"tensor": {"shape": [2], "stride": [1], "dtype": "float32", "device": "$(rm)"}},
        {"tensor": {"shape": [2, 2], "stride": [1], "dtype": "float32", "device": "cpu"}},
        {"layout": "dense"},
        {"dict": [[1]]},
    ],
)
def test_malformed_argument_is_refused(form: object) -> None:
    with pytest.raises(FormatError):
        decode(form)


@pytest.mark.parametrize(
    ("field", "body"),
    [
        *(("offset", body) for body in ("x", -9, 1.0, True, None, 2**63)),
        *((field, body) for field in ("storage", "values") for body in ("a", -1, 1.5, False, [], {}, 2**63)),
        *((field, body) for field in ("requires_grad", "conj", "neg", "pinned") for body in (3, 0, "y", None, [])),
        *(("layout", body) for body in ("dense", 0, [], None)),
        *(("cls", body) for body in (1, [], {})),
        *(("made_of", body) for body in (1, "coo", [], {}, {"coo": 1}, {"coo": {}, "nested": {}})),
    ],
)
def test_tensor_with_a_field_of_another_type_is_refused(field: str, body: object) -> None:
    form = {"shape": [2], "stride": [1], "dtype": "float32", "device": "cpu"}
    assert decode({"tensor": form}) == TensorSpec((2,), (1,), torch.float32, "cpu")
    with pytest.raises(FormatError):
        decode({"tensor": form | {field: body}})


class _Settings(dict[str, object]):
    def __getattr__(self, name: str) -> object:
        return self[name]


class _Pair(NamedTuple):
    first: object
    second: object


def test_containers_keep_their_classes() -> None:
    tree = [_Settings(a=1, b=_Pair(2, [3])), OrderedDict(c=torch.Size([4]))]
    made = map_leaves(lambda leaf: leaf if isinstance(leaf, torch.Size) else leaf + 1, tree)
    assert made == [{"a": 2, "b": (3, [4])}, {"c": (4,)}]
    assert [type(one) for one in made] == [_Settings, OrderedDict]
    assert made[0].b.second == [4]
    assert tree[0] == {"a": 1, "b": (2, [3])}


class Point:
    ran = 0

    def __init__(self) -> None:
        type(self).ran += 1

    @property
    def shown(self) -> int:
        raise AssertionError


class Names(dict[str, int]):
    """Dictionary with fields."""


CLASSES = {"Point": Point, "Names": Names}


def nested(depth: int) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = ObjectSpec("m:Point", {"inner": tree})
    return tree


def test_objects_are_made_without_their_constructor() -> None:
    point = make_arguments(ObjectSpec("m:Point", {"x": 1, "shown": 2}), CLASSES)
    assert (type(point), vars(point), Point.ran) == (Point, {"x": 1, "shown": 2}, 0)


def test_contents_of_builtin_base_classes_are_restored() -> None:
    names = make_arguments(ObjectSpec("m:Names", {"x": 1}, {"a": 2}), CLASSES)
    assert (type(names), dict(names), names.x) == (Names, {"a": 2}, 1)
    order = make_arguments(ObjectSpec("collections:OrderedDict", {}, {"b": 1, "a": 2}), {})
    assert order == collections.OrderedDict(b=1, a=2)
    lists = make_arguments(
        ObjectSpec("collections:defaultdict", {"default_factory": NamedSpec("builtins:list")}, {}), {}
    )
    assert lists["new"] == []
    assert make_arguments(ObjectSpec("types:SimpleNamespace", {"a": 1}), {}) == types.SimpleNamespace(a=1)


def test_self_referencing_containers_are_made() -> None:
    tree = SharedSpec(0, [SameSpec(0), SharedSpec(1, {"list": SameSpec(0), "self": SameSpec(1)}), SameSpec(1)])
    made = make_arguments(tree, {})
    assert made[0] is made
    assert made[1] is made[2] is made[1]["self"]
    assert made[1]["list"] is made


def test_torch_modules_need_no_trust() -> None:
    weight = ObjectSpec("torch.nn.parameter:Parameter", {}, torch.ones(2, 3, requires_grad=True) * 1)
    spec = ModuleSpec("torch.nn.modules.linear:Linear", {"weight": weight, "bias": None}, {}, {}, {"in_features": 3})
    linear = make_arguments(spec, {})
    assert linear(torch.ones(3)).tolist() == [3, 3]
    assert linear.weight.requires_grad
    assert linear.weight.is_leaf


@pytest.mark.parametrize(
    "tree",
    [
        ObjectSpec("m:Missing"),
        ObjectSpec("m:Point", content=[1]),
        ObjectSpec("builtins:eval"),
        ObjectSpec("torch._C:Generator"),
        ObjectSpec("torch._C:Generator", {"device": "cpu", "state": torch.zeros(3)}),
        ObjectSpec("torch.nn.parameter:Parameter", {}, 1),
        ObjectSpec("collections:deque", {"maxlen": 2}, [1]),
        ArraySpec(torch.ones(1, dtype=torch.bfloat16)),
        ScalarSpec("object", 1),
        ScalarSpec("int8", 300),
        NamedSpec("torch:load"),
        NamedSpec("os:system"),
        NamedSpec("m:Point.ran.__class__"),
        NamedSpec(""),
        SameSpec(0),
        SharedSpec(0, (SameSpec(0),)),
        Opaque("lock"),
        nested(3000),
    ],
    ids=lambda tree: repr(tree)[:60] if not isinstance(tree, ObjectSpec) or "inner" not in tree.fields else "nested",
)
def test_object_that_cannot_be_made_is_a_user_error(tree: Any) -> None:
    with pytest.raises(UserError, match="an argument cannot be created: "):
        make_arguments([tree], CLASSES)


def test_field_that_cannot_be_made_remains_unset() -> None:
    point = make_arguments(
        ObjectSpec("m:Point", {"x": Opaque("lock"), "y": [ObjectSpec("m:Missing")], "z": 1}), CLASSES
    )
    assert vars(point) == {"z": 1}


def test_numpy_scalars_keep_their_type() -> None:
    made = make_arguments([ScalarSpec("float32", 0.5), ScalarSpec("bool", True), ScalarSpec("complex64", 1j)], {})
    assert [type(item) for item in made] == [np.float32, np.bool_, np.complex64]
