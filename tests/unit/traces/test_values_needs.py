"""Which model an argument needs, also in pieces of large tensors, and results of operators on drawn values."""

from __future__ import annotations

import math
import warnings
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from redrawn import drawn, fitted, seeded
from torch.utils._python_dispatch import TorchDispatchMode
from versions import is_removed

from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.values import depends_on_values, fit, fit_argument, refine_model
from opgrip.traces.values.boxes import Boxes
from opgrip.traces.values.defaults import Factorable, Triangular
from opgrip.traces.values.exact import Booleans, Constant, OneHot
from opgrip.traces.values.floats import Floats, Probabilities
from opgrip.traces.values.integers import Integers
from opgrip.traces.values.model import MOST
from opgrip.traces.values.needs import NEEDS
from opgrip.traces.values.order import Permutation
from opgrip.traces.values.progression import Offsets, Progression


def outputs(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return TensorSpec(tuple(result.shape), result.stride(), result.dtype, "cpu")
    return tuple(outputs(each) for each in result)


def arguments() -> list[tuple[str, str]]:
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")]
    return [
        (f"aten.{schema.name.removeprefix('aten::')}.{schema.overload_name or 'default'}", argument.name)
        for schema in schemas
        for argument in schema.arguments
        if "Tensor" in str(argument.type)
    ]


def test_every_row_refers_to_an_existing_argument() -> None:
    known = arguments()
    patterns = [(pattern, need.argument) for need in NEEDS for pattern in need.op.split("|")]
    for pattern, arguments_of_row in patterns:
        if pattern.startswith("aten.") and not is_removed(pattern):
            ops = [argument for op, argument in known if fnmatchcase(op, pattern)]
            for name in arguments_of_row.split("|"):
                assert any(fnmatchcase(argument, name) for argument in ops), (pattern, name)


def test_requested_model_is_tried_only_where_the_table_says_so() -> None:
    factor = torch.randn(20, 20, generator=seeded(0))
    positive, triangular = factor @ factor.T + torch.eye(20), (factor + 9 * torch.eye(20)).tril()
    assert isinstance(fit_argument("aten.linalg_cholesky_ex.default", "self", positive), Factorable)
    assert isinstance(fit_argument("aten.linalg_solve_triangular.default", "self", triangular), Triangular)
    assert isinstance(fit_argument("aten.cholesky_solve.default", "input2", triangular), Triangular)
    for op, argument in (("aten.mm.default", "self"), ("aten.linalg_solve_triangular.default", "B")):
        assert isinstance(fit_argument(op, argument, positive), Floats)
        assert isinstance(fit(triangular), Floats)


def test_arguments_get_the_model_that_they_need() -> None:
    lengths = torch.randint(0, 9, (100,), generator=seeded(0))
    corners = torch.rand(100, 2, generator=seeded(0)) * 100
    boxes = torch.cat([corners, corners + 5], dim=1)
    cases: list[tuple[str, str, torch.Tensor, type]] = [
        ("aten._embedding_bag.default", "offsets", lengths.cumsum(0), Offsets),
        ("aten._embedding_bag.default", "indices", lengths, Integers),
        ("aten.index.Tensor", "indices", lengths > 4, Booleans),
        ("aten.multinomial.default", "self", torch.randn(20, 20, generator=seeded(0)).softmax(-1), Probabilities),
        ("mmcv._ext:nms", "0", boxes, Boxes),
        ("mmcv._ext:nms", "boxes", boxes, Boxes),
    ]
    for op, argument, tensor, kind in cases:
        assert type(fit_argument(op, argument, tensor)) is kind


@pytest.mark.parametrize(
    ("op", "argument", "dtype", "expected"),
    [
        ("aten.nonzero.default", "self", torch.float32, True),
        ("aten.index.Tensor", "indices", torch.int64, True),
        ("aten.add.Tensor", "self", torch.int64, False),
        ("aten._unique2.default", "self", torch.int64, True),
        ("mmcv._ext:nms", "0", torch.float32, True),
        ("somebody._ext:function", "3", torch.int32, True),
        ("somebody._ext:function", "3", torch.float32, False),
        ("aten.scatter_add_.default", "index", torch.int64, True),
        ("aten.scatter_add_.default", "src", torch.float32, False),
    ],
)
def test_dependence_on_values_is_known_by_argument(op: str, argument: str, dtype: torch.dtype, expected: bool) -> None:
    assert depends_on_values(op, argument, dtype) is expected


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(3000, generator=seeded(0)) > 0.7,
        torch.randn(3000, generator=seeded(0)).relu(),
        torch.randint(-400, 400, (3000,), generator=seeded(0)),
        torch.randn(3000, generator=seeded(0)).relu().half(),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_nonzero_finds_the_recorded_number(tensor: torch.Tensor) -> None:
    model = fit_argument("aten.nonzero.default", "self", tensor)
    assert model is not None
    model = refine_model("aten.nonzero.default", "self", model, outputs(tensor.nonzero()))
    assert len(drawn(model, tensor).nonzero()) == len(tensor.nonzero())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randint(0, 700, (3000,), generator=seeded(0)),
        torch.randint(0, 1 << 50, (3000,), generator=seeded(0)),
        torch.randint(0, 700, (3000,), generator=seeded(0)).float(),
        torch.randn(3000, generator=seeded(0)).relu(),
        torch.randint(0, 99, (3000,), generator=seeded(0)).sort().values,
    ],
    ids=["narrow", "wide", "floats", "relu", "sorted"],
)
def test_unique_finds_the_recorded_number(tensor: torch.Tensor) -> None:
    result = torch._unique2(tensor)
    model = fit_argument("aten._unique2.default", "self", tensor)
    assert model is not None
    model = refine_model("aten._unique2.default", "self", model, outputs(result))
    assert len(torch._unique2(drawn(model, tensor))[0]) == len(result[0])


def test_repeat_interleave_returns_the_recorded_length() -> None:
    tensor = torch.randint(0, 900, (3000,), generator=seeded(0))
    result = torch.repeat_interleave(tensor)
    model = refine_model("aten.repeat_interleave.Tensor", "repeats", fitted(tensor, Integers), outputs(result))
    assert len(torch.repeat_interleave(drawn(model, tensor))) == len(result)


@pytest.mark.parametrize("op", ["mmcv._ext:nms", "torchvision.nms.default"])
def test_nms_output_determines_the_number_of_groups(op: str) -> None:
    corners = torch.rand(300, 2, generator=seeded(0)) * 100
    boxes = torch.cat([corners, corners + 50], dim=1)
    argument = "0" if "mmcv" in op else "dets"
    model = refine_model(op, argument, fitted(boxes, Boxes), outputs(torch.arange(20)))
    assert isinstance(model, Boxes)
    assert model.groups == 20
    assert refine_model(op, argument, fitted(boxes, Boxes), outputs(torch.arange(0))) == fitted(boxes, Boxes)


ADD = "aten.add.Tensor"


class CountingElements(TorchDispatchMode):
    """Counter of the elements that operators process, except operators that return views."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if all(item.alias_info is None for item in func._schema.returns):
            self.elements += sum(value.numel() for value in args if isinstance(value, torch.Tensor))
        return func(*args, **(kwargs or {}))


def test_fitting_does_not_read_all_elements() -> None:
    # a terabyte, of which one row exists
    tensor = torch.randn(1, 300).expand(1 << 30, 300)
    with CountingElements() as counting:
        model = fit_argument(ADD, "self", tensor)
    assert 300 < counting.elements < 10 * MOST
    assert isinstance(model, Floats)
    assert abs(model.mean - tensor[0].mean()) < 0.2


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.zeros(1 << 20), Constant),
        (torch.nn.functional.one_hot(torch.randint(0, 9, (10_000,)), 9), OneHot),
        (torch.rand(1 << 16) < 0.5, Booleans),
        (torch.arange(1 << 16), Progression),
        (torch.arange(100.0).repeat_interleave(1000), Progression),
        (torch.randperm(1 << 16), Permutation),
        (torch.randn(8, 2000).softmax(-1), Probabilities),
        (torch.randn(4, 30_000).softmax(-1), Probabilities),
        (torch.randint(0, 80, (1 << 16,)), Integers),
        (torch.randn(256, 256).relu(), Floats),
    ],
)
def test_kind_of_a_large_tensor_is_found_from_its_pieces(tensor: torch.Tensor, kind: type) -> None:
    model = fit_argument(ADD, "self", tensor)
    assert isinstance(model, kind)
    again = model.draw(tuple(tensor.shape), tensor.dtype, torch.Generator().manual_seed(0))
    assert again.shape == tensor.shape
    assert abs((again == 0).double().mean() - (tensor == 0).double().mean()) < 0.05


def test_fitting_a_mask_of_minus_infinity_does_not_warn() -> None:
    mask = torch.full((128, 128), -math.inf).triu(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(fit_argument(ADD, "self", mask), Floats)
        for values in (torch.tensor([-(2**63), 2**63 - 1]), torch.tensor([-1.7e308, 1.7e308], dtype=torch.float64)):
            assert fit_argument(ADD, "self", values.repeat(500)) is not None


@pytest.mark.parametrize(("op", "argument"), [("aten.nonzero.default", "self"), ("aten.masked_select.default", "mask")])
def test_all_elements_are_counted_if_they_determine_an_output_size(op: str, argument: str) -> None:
    mask = torch.zeros(1 << 20, dtype=torch.bool)
    mask[12345] = mask[777777] = True
    model = fit_argument(op, argument, mask)
    assert isinstance(model, Booleans)
    assert model.true == 2
    if op == "aten.nonzero.default":
        model = fit_argument(op, argument, mask.float() * 0.3)
        assert isinstance(model, Floats)
        assert round((1 - model.zeros) * (1 << 20)) == 2
