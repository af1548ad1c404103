"""Value models: drawn values cost, sort, index and overlap like the recorded ones, also in pieces of large tensors."""

import math
import warnings
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from redrawn import drawn, fitted, seeded
from torch.utils._python_dispatch import TorchDispatchMode
from versions import is_removed

from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.values import depends_on_values, fit, fit_argument, refine_model
from opgrip.traces.values.boxes import Boxes, overlapping
from opgrip.traces.values.defaults import Factorable, Triangular
from opgrip.traces.values.drawing import at_quantiles
from opgrip.traces.values.exact import Booleans, Constant, OneHot
from opgrip.traces.values.floats import PROBABILITIES, Floats, Probabilities
from opgrip.traces.values.integers import Integers
from opgrip.traces.values.model import MOST
from opgrip.traces.values.needs import NEEDS
from opgrip.traces.values.order import Permutation
from opgrip.traces.values.progression import Offsets, Progression

WIDE = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@given(st.floats(-1e3, 1e3), st.floats(0.01, 1e3), st.floats(0, 0.8), st.integers(0, 9))
def test_fit_of_drawn_floats_equals_the_model(mean: float, std: float, zeros: float, seed: int) -> None:
    generator = seeded(seed)
    tensor = torch.randn(5000, generator=generator, dtype=torch.float64) * std + mean
    tensor[torch.rand(5000, generator=generator) < zeros] = 0
    model = fitted(tensor, Floats)
    again = fitted(drawn(model, tensor), Floats)
    assert abs(again.mean - model.mean) < 0.3 * model.std
    assert again.std == pytest.approx(model.std, rel=0.2)
    assert again.zeros == model.zeros
    assert (again.low, again.high) == (model.low, model.high)


@pytest.mark.parametrize(
    ("shape", "tensor"),
    [
        ("normal", torch.randn(20_000, generator=seeded(0)) * 5 - 3),
        ("uniform", torch.rand(20_000, generator=seeded(0)) * 5 - 3),
        ("quantiles", torch.rand(20_000, generator=seeded(0)).log()),
        ("quantiles", torch.cat([torch.randn(10_000), torch.randn(10_000) + 50])),
        ("quantiles", torch.randint(0, 4, (20_000,), generator=seeded(0)).float() + 1),
    ],
    ids=["normal", "uniform", "exponential", "two hills", "whole"],
)
def test_distribution_keeps_its_shape(shape: str, tensor: torch.Tensor) -> None:
    model = fitted(tensor, Floats)
    assert model.shape == shape
    again = drawn(model, tensor)
    levels = torch.linspace(0.02, 0.98, 25)
    apart = (again.quantile(levels) - tensor.quantile(levels)).abs()
    assert float(apart.median()) <= 0.05 * float(tensor.std())
    assert (again.min(), again.max()) == (tensor.min(), tensor.max())


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("count", [700, 300_000])
def test_special_values_keep_their_number(dtype: torch.dtype, count: int) -> None:
    tensor = torch.randn(count, generator=seeded(0)).to(dtype)
    tiny = torch.finfo(dtype).tiny
    tensor[tensor.abs() < tiny] = 1
    mixed = torch.randperm(count, generator=seeded(1))
    specials = {0.0: 201, math.nan: 33, math.inf: 17, -math.inf: 5, tiny / 8: 101, -tiny / 4: 7}
    begin = 0
    for value, times in specials.items():
        tensor[mixed[begin : begin + times]] = value
        begin += times
    again = drawn(fitted(tensor, Floats), tensor)
    assert int((again == 0).sum()) == 201
    assert int(again.isnan().sum()) == 33
    assert int((again == math.inf).sum()) == 17
    assert int((again == -math.inf).sum()) == 5
    assert int(((again != 0) & (again.abs() < tiny)).sum()) == 108


def test_zeros_of_relu_stay_together() -> None:
    kept = (torch.rand(100, generator=seeded(0)) < 0.5).repeat_interleave(20)
    tensor = torch.randn(2000, generator=seeded(1)).abs() * kept
    again = drawn(fitted(tensor, Floats), tensor)
    assert int((again == 0).sum()) == int((tensor == 0).sum())

    def borders(values: torch.Tensor) -> int:
        return int((values == 0).diff().sum())

    # zeros at random positions would have five times as many borders
    assert borders(again) == pytest.approx(borders(tensor), rel=1)


@pytest.mark.parametrize("dtype", [*WIDE, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_floating_point_dtype_is_fitted_and_drawn(dtype: torch.dtype) -> None:
    tensor = torch.randn(300, generator=seeded(0)).to(dtype)
    again = drawn(fitted(tensor, Floats), tensor).to(torch.complex64 if dtype.is_complex else torch.float32)
    assert 0.8 < float(again.std()) < 1.3


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_sorted_floats_stay_sorted(dtype: torch.dtype) -> None:
    tensor = torch.rand(500, generator=seeded(0)).to(dtype).sort().values
    for values in (tensor, tensor.flip(0)):
        again = drawn(fitted(values, Floats), values)
        assert torch.equal(again, again.sort(descending=values is not tensor).values)


def test_sorted_rows_stay_sorted() -> None:
    scores = torch.rand(30, 200, generator=seeded(0)).sort(dim=-1, descending=True).values
    again = drawn(fitted(scores, Floats), scores)
    assert float(again.diff(dim=-1).max()) <= 0
    boundaries = torch.randn(4, 100, generator=seeded(0)).sort(dim=-1).values + torch.arange(0, 400, 100)[:, None]
    assert float(drawn(fitted(boundaries, Floats), boundaries).diff(dim=-1).min()) >= 0


def test_similar_neighbours_stay_similar() -> None:
    image = torch.nn.functional.interpolate(
        torch.randn(1, 3, 8, 8, generator=seeded(0)), scale_factor=16, mode="bilinear"
    )
    model = fitted(image, Floats)
    assert model.step is not None
    again = drawn(model, image)
    assert float(again.reshape(-1).diff().abs().mean()) == pytest.approx(model.step, rel=1)
    assert float(again.std()) == pytest.approx(float(image.std()), rel=0.1)


@given(st.integers(65, 3000), st.integers(1, 3000), st.sampled_from([torch.float32, torch.float64]))
def test_requested_number_of_distinct_floats_is_drawn(count: int, kinds: int, dtype: torch.dtype) -> None:
    kinds = min(kinds, count)
    model = Floats(0.0, 1.0, -4.0, 4.0, 0.0, 0.0, 0.0, 0.0, distinct=kinds)
    assert len(drawn(model, torch.empty(count, dtype=dtype)).unique()) == kinds


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("heat", [0.1, 5, 30])
@pytest.mark.parametrize("shape", [(2, 3, 16, 8), (300,)])
def test_probabilities_sum_to_one_and_keep_their_peak(dtype: torch.dtype, heat: float, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=seeded(0)) * heat).softmax(-1).to(dtype)
    model = fitted(tensor, Probabilities)
    again = drawn(model, tensor)
    assert float(again.min()) >= 0
    assert type(fit(again)) is Probabilities
    assert float(again.float().amax(-1).mean()) == pytest.approx(model.peak, abs=0.02 if len(shape) > 1 else 0.15)
    assert int((again == 0).sum()) == int((tensor == 0).sum())
    tiny = torch.finfo(dtype).tiny
    assert int((again.abs() < tiny).sum()) == int((tensor.abs() < tiny).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [9, 64, 300])
def test_positive_definite_matrices_stay_positive_definite(dtype: torch.dtype, size: int) -> None:
    factor = torch.randn(3, size, size, dtype=dtype, generator=seeded(0))
    tensor = factor @ factor.mT * 7 + torch.eye(size, dtype=dtype)
    model = fit(tensor, requested_kinds=["factorable"])
    assert isinstance(model, Factorable)
    again = drawn(model, tensor)
    torch.linalg.cholesky(again)
    assert float(again.diagonal(dim1=-2, dim2=-1).mean()) == pytest.approx(model.diagonal, rel=0.2)
    assert float(again.std()) == pytest.approx(float(tensor.std()), rel=0.3)
    assert not isinstance(fit(tensor), Factorable)


@pytest.mark.parametrize("upper", [True, False])
@pytest.mark.parametrize("size", [10, 400])
def test_triangular_matrices_stay_solvable(upper: bool, size: int) -> None:
    factor = torch.randn(size, size, generator=seeded(0)) / size + torch.eye(size)
    tensor = (factor.triu() if upper else factor.tril()).contiguous()
    model = fit(tensor, requested_kinds=["factorable", "triangular"])
    assert isinstance(model, Triangular)
    again = drawn(model, tensor)
    solution = torch.linalg.solve_triangular(again, torch.randn(size, 2, generator=seeded(1)), upper=upper)
    assert float(solution.abs().max()) < 1e4
    assert torch.equal(again, again.triu() if upper else again.tril())


def test_distant_quantiles_give_finite_values() -> None:
    levels = [-1.7e308, *[0.0] * (len(PROBABILITIES) - 2), 1.7e308]
    assert bool(at_quantiles(levels, PROBABILITIES, 100_000, torch.Generator().manual_seed(0)).isfinite().all())


def proposals(count: int, seed: int = 0, *, sides: float = 200.0) -> torch.Tensor:
    corners = torch.rand(count, 2, generator=seeded(seed)) * torch.tensor([1200.0, 700.0])
    return torch.cat([corners, corners + 2 + torch.rand(count, 2, generator=seeded(seed + 1)) * sides], dim=1)


def told(boxes: torch.Tensor, groups: int) -> Boxes:
    model = fitted(boxes, Boxes)
    return Boxes(model.first, model.low, model.high, model.whole, model.quantiles, model.overlap, groups)


def kept(boxes: torch.Tensor, scores: torch.Tensor, threshold: float, offset: int) -> int:
    boxes = boxes[scores.argsort(descending=True)]
    areas = (boxes[:, 2:] - boxes[:, :2] + offset).prod(1)
    alive = torch.ones(len(boxes), dtype=torch.bool)
    count = 0
    for at in range(len(boxes)):
        if not alive[at]:
            continue
        count += 1
        sides = torch.minimum(boxes[at, 2:], boxes[:, 2:]) - torch.maximum(boxes[at, :2], boxes[:, :2]) + offset
        inside = sides.clamp(min=0).prod(1)
        alive &= inside / (areas[at] + areas - inside) <= threshold
    return count


@given(st.integers(17, 400), st.floats(0, 1), st.floats(1, 2000), st.booleans(), st.floats(0, 90_000))
@settings(max_examples=15)
def test_suppression_keeps_the_recorded_number_at_any_sizes(
    count: int, share: float, sides: float, whole: bool, away: float
) -> None:
    boxes = proposals(count, sides=sides) + away
    if whole:
        boxes = boxes.round()
    groups = max(1, round(share * count))
    again = drawn(told(boxes, groups), boxes)
    for threshold in (0.3, 0.7):
        assert kept(again, torch.rand(count, generator=seeded(0)), threshold, 0) == groups
    low, high = (again[:, :2].amin(0), again[:, :2].amax(0))
    assert bool((low >= boxes[:, :2].amin(0) - 1).all() and (high <= boxes[:, :2].amax(0) + 1 + 0.01 * sides).all())


def test_crowded_boxes_stay_crowded() -> None:
    centres = proposals(50)
    boxes = (centres[:, None] + torch.rand(50, 20, 4, generator=seeded(5))).reshape(-1, 4)
    model = fitted(boxes, Boxes)
    assert model.overlap is not None
    assert overlapping(drawn(model, boxes)) == pytest.approx(model.overlap, rel=0.3)
    alone = proposals(1000, sides=20)
    assert overlapping(drawn(fitted(alone, Boxes), alone)) < 1


def test_boxes_stay_boxes_and_image_indices_stay_indices() -> None:
    image = torch.randint(0, 3, (500, 1), generator=seeded(0)).float()
    rois = torch.cat([image, proposals(500)], dim=1)
    again = drawn(fitted(rois, Boxes), rois)
    assert set(again[:, 0].tolist()) <= {0.0, 1.0, 2.0}
    assert bool((again[:, 3:] >= again[:, 1:3]).all())


def test_fit_of_drawn_boxes_equals_the_model() -> None:
    for boxes in (proposals(3000), proposals(3000).round()):
        model = fitted(boxes, Boxes)
        again = fitted(drawn(model, boxes), Boxes)
        assert again.whole == model.whole
        assert again.low == pytest.approx(model.low, abs=5)
        assert again.high == pytest.approx(model.high, abs=5)


TOP = torch.iinfo(torch.int64).max


@given(st.integers(66, 5000), st.integers(-1000, 1000), st.integers(2, 100_000), st.floats(0.2, 4), st.integers(0, 9))
def test_fit_of_drawn_integers_equals_the_model(count: int, low: int, width: int, bend: float, seed: int) -> None:
    tensor = (torch.rand(count, generator=seeded(seed)).double().pow(bend) * width).long() + low
    # neither constant nor sorted
    tensor[0], tensor[1], tensor[2] = low + 1, low, low + 1
    model = fitted(tensor, Integers)
    values = drawn(model, tensor)
    again = fit(values)
    assert isinstance(again, Integers)
    assert again.distinct == model.distinct
    assert torch.equal(torch.stack(values.aminmax()), torch.stack(tensor.aminmax()))
    # other values of equal frequency may be kept last; single negative values are kept only if there are few others
    counts = sorted(count for value, count in model.frequent if value and (value > 0 or count > 1))
    counts_again = sorted(count for value, count in again.frequent if value and (value > 0 or count > 1))
    assert counts_again == pytest.approx(counts, abs=1)
    for value, count in model.frequent:
        assert int((values == value).sum()) == count


def test_tail_of_a_skewed_tensor_stays_skewed() -> None:
    tensor = torch.rand(200_000, generator=seeded(0)).double().pow(-1.5).long() % 100_003
    model = fitted(tensor, Integers)
    assert model.zipf > 0.5
    again = fitted(drawn(model, tensor), Integers)
    assert again.zipf == pytest.approx(model.zipf, abs=0.35)
    assert int(drawn(model, tensor).bincount().max()) == int(tensor.bincount().max())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32])
def test_integers_of_every_width_are_fitted_and_drawn(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 100, (3000,), generator=seeded(0)).to(dtype)
    again = drawn(fitted(tensor, Integers), tensor)
    assert int(again.long().max()) == 99
    assert len(again.long().unique()) == 100


def test_integers_over_the_full_range_are_drawn() -> None:
    tensor = torch.randint(-TOP, TOP, (500,), generator=seeded(0))
    tensor[3], tensor[5] = -TOP - 1, TOP
    again = drawn(fitted(tensor, Integers), tensor)
    assert (int(again.min()), int(again.max())) == (-TOP - 1, TOP)
    assert len(again.unique()) == 500


def test_rare_zeros_are_counted() -> None:
    tensor = torch.randint(-5000, 5000, (20_000,), generator=seeded(0))
    for zeros in (0, 1, 5):
        tensor[tensor == 0] = 7
        tensor[100 : 100 + zeros] = 0
        assert int((drawn(fitted(tensor, Integers), tensor) == 0).sum()) == zeros


@pytest.mark.parametrize("is_old", [False, True])
def test_single_ignore_index_is_the_only_negative_value(is_old: bool) -> None:
    labels = torch.randperm(31_900, generator=seeded(0))[:129]
    labels[5] = -100
    model = fitted(labels, Integers)
    if is_old:
        model = replace(model, frequent=[[0, 0]], low=-100, others=129)
    for seed in range(10):
        again = model.draw((129,), torch.int64, seeded(seed))
        assert again[again < 0].tolist() == [-100]
        assert len(again.unique()) == 129


def test_integers_have_the_given_total() -> None:
    tensor = torch.randint(0, 1000, (3000,), generator=seeded(0))
    model = Integers([[0, 100]], 1, 999, 2900, False, 800, total=int(tensor.sum()))
    again = drawn(model, tensor)
    assert int(again.sum()) == int(tensor.sum())
    assert (int(again.min()), int(again.max())) == (0, 999)


@given(
    st.integers(-1000, 1000),
    st.integers(-50, 50).filter(bool),
    st.integers(1, 40),
    st.integers(2, 200),
    st.integers(66, 3000),
)
def test_progression_is_kept_exactly(start: int, step: int, repeats: int, period: int, count: int) -> None:
    tensor = start + step * (torch.arange(count) // repeats % period)
    if count <= repeats:
        return
    for values in (tensor, tensor.float(), tensor.double() / 4):
        assert torch.equal(drawn(fitted(values, Progression), values), values)


def test_long_progressions_are_found_by_some_of_their_elements() -> None:
    y, x = torch.meshgrid(torch.arange(700), torch.arange(1100), indexing="ij")
    for tensor in (y, x, y.T, x.T, torch.arange(900_000) * 3 - 7, y.reshape(-1).to(torch.uint16), y.repeat(2, 1) / 8):
        assert torch.equal(drawn(fitted(tensor, Progression), tensor), tensor)


def test_tensor_that_only_starts_like_a_progression_gets_another_model() -> None:
    zeros = torch.zeros(1 << 19)
    zeros[1 << 18 :] = torch.rand(1 << 18)
    ramp = torch.arange(1 << 19)
    ramp[1 << 18 :] += 1
    for tensor in (zeros, zeros.flip(0), ramp, torch.arange(1 << 19) // 100_000 % 3 * 2 % 3):
        assert Progression.fit(tensor) is None


def test_largest_integers_can_be_drawn() -> None:
    for tensor in (torch.arange(TOP - 99, TOP), torch.full((100,), TOP), torch.tensor([*range(99), TOP])):
        model = fit(tensor)
        assert model is not None
        assert int(drawn(model, tensor).max()) == int(tensor.max())


@given(st.integers(66, 3000), st.integers(-100, 100), st.integers(0, 9))
def test_permutation_stays_a_permutation(count: int, low: int, seed: int) -> None:
    tensor = torch.randperm(count, generator=seeded(seed + 2)) + low
    again = drawn(fitted(tensor, Permutation), tensor)
    assert torch.equal(again.sort().values, torch.arange(count) + low)
    assert not torch.equal(again, tensor)
    shorter, longer = (Permutation(low, low + count - 1).draw((size,), torch.int64, seeded(0)) for size in (9, 7000))
    assert len(shorter.unique()) == 9
    assert len(longer.unique()) == count


@given(
    st.lists(st.integers(0, 10), min_size=66, max_size=900).filter(lambda lengths: len({*lengths[1:-1]}) > 1),
    st.integers(-99, 99),
)
def test_offsets_keep_their_ends_and_lengths(lengths: list[int], first: int) -> None:
    tensor = torch.tensor([first, *lengths]).cumsum(0)
    if type(fit(tensor)) is Progression:
        return
    again = drawn(fitted(tensor, Offsets), tensor)
    assert (int(again[0]), int(again[-1])) == (int(tensor[0]), int(tensor[-1]))
    assert torch.equal(again.diff().sort().values, tensor.diff().sort().values)


def order_kinds(count: int) -> dict[str, torch.Tensor]:
    values = torch.randint(0, 5000, (count,), generator=seeded(0))
    walk = torch.randint(-3, 4, (count,), generator=seeded(1)).cumsum(0)
    return {
        "descending": values.sort(descending=True).values,
        "ascending runs": values.reshape(8, -1).sort(dim=-1).values.reshape(-1),
        "ascending rows": values.reshape(8, -1).sort(dim=-1).values,
        "descending rows": values.reshape(8, -1).sort(dim=-1, descending=True).values,
        "blocks": (values[: count // 8] // 9).repeat_interleave(8),
        "near": walk,
        "shuffled": values,
        "few": values % 3,
    }


@pytest.mark.parametrize("kind", order_kinds(80))
def test_order_of_integers_is_kept(kind: str) -> None:
    tensor = order_kinds(8000)[kind]
    model = fitted(tensor, Integers)
    again = fit(drawn(model, tensor))
    assert isinstance(again, Integers)
    assert again.rises == pytest.approx(model.rises, abs=0.03)
    assert again.falls == pytest.approx(model.falls, abs=0.03)
    assert model.step is not None
    # a drawn walk may have larger steps than the recorded one of the same values
    assert again.step == pytest.approx(model.step, rel=1 if kind == "near" else 0.1)
    assert again.by_row == model.by_row


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
