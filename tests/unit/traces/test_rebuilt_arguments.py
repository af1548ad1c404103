"""Live arguments made from untrusted specs only."""

from __future__ import annotations

import collections
import types
from typing import Any

import numpy as np
import pytest
import torch

from opgrip.traces import UserError
from opgrip.traces.rebuild import make_arguments
from opgrip.traces.schema.arguments import Opaque
from opgrip.traces.schema.python_objects import (
    ArraySpec,
    ModuleSpec,
    NamedSpec,
    ObjectSpec,
    SameSpec,
    ScalarSpec,
    SharedSpec,
)


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
