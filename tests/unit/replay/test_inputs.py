"""Generated arguments: they match the recorded ones, indices are valid, operators behave as on recorded ones."""

import math
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_data import operator_of
from hypothesis import given, settings
from hypothesis import strategies as st
from redrawn import HERE, described, drawn, fitted, read_again
from versions import is_removed

from opgrip.replay.inputs.filling import LONG_PIECE, with_values
from opgrip.replay.inputs.input_options import RECORDED
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.replay.inputs.layouts import distinct_in_rows, distinct_places, fitting_lengths
from opgrip.replay.operators.lookup import Unsupported
from opgrip.traces import load
from opgrip.traces.schema.arguments import GeneratorSpec, TensorSpec
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.values import fit, value_model_from_json, value_model_to_json, value_models
from opgrip.traces.values.defaults import DEFAULTS, default_values
from opgrip.traces.values.exact import Booleans, Constant, Exact, OneHot


def made(*args: Any) -> tuple[Any, ...]:
    specs, models = described(*args)
    return Inputs(specs, {}, models, HERE, seed=0).make()[0]


@st.composite
def layouts(draw: st.DrawFn) -> torch.Tensor:
    """Draw a view of some memory: permuted, strided, sliced, expanded or of overlapping windows."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
    dtype = draw(st.sampled_from(dtypes))
    tensor = torch.randint(0, 5, [size * 2 for size in shape]).to(dtype)
    for dimension in range(len(shape)):
        start, step = draw(st.integers(0, 1)), draw(st.integers(1, 2))
        tensor = tensor[(slice(None),) * dimension + (slice(start, None, step),)]
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()):
        tensor = tensor[..., :1].expand(*tensor.shape[:-1], 7)
    if draw(st.booleans()):
        tensor = tensor.unfold(0, 1, 1)
    return tensor


@given(layouts())
@settings(max_examples=200)
def test_tensor_has_its_recorded_layout_and_values(tensor: torch.Tensor) -> None:
    (again,) = made(tensor)
    assert again.shape == tensor.shape
    assert again.stride() == tensor.stride()
    assert again.storage_offset() == tensor.storage_offset()
    assert again.dtype == tensor.dtype
    if tensor.numel() <= 64 and 0 not in tensor.stride():
        assert torch.equal(again, tensor)


def test_arguments_that_shared_memory_share_it_again() -> None:
    base = torch.zeros(4, 6)
    whole, row, other = made(base, base[1:2, 2:], torch.zeros(3))
    row.fill_(7)
    assert whole[1, 2:].tolist() == [7] * 4
    assert float(whole.sum()) == 28
    assert float(other.sum()) == 0


def test_requires_grad_conj_and_neg_are_kept() -> None:
    complex_values = torch.randn(3, dtype=torch.complex64)
    weight, conjugate, negated = made(
        torch.randn(3, requires_grad=True), complex_values.conj(), complex_values.conj().imag
    )
    assert weight.requires_grad
    assert conjugate.is_conj()
    assert negated.is_neg()


def test_same_seed_draws_the_same_values() -> None:
    specs, models = described(torch.randn(500))
    draws = [Inputs(specs, {}, models, HERE, seed=seed).make()[0][0] for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize(
    "mutate",
    [
        lambda tensor: tensor.mul_(3),
        lambda tensor: tensor.t_().zero_(),
        lambda tensor: tensor.resize_(0),
        lambda tensor: tensor.resize_(50, 50),
        lambda tensor: tensor.set_(torch.ones(7)),
    ],
)
def test_any_mutation_of_arguments_is_undone(mutate: Any) -> None:
    specs, models = described(torch.randn(5, 6).t())
    inputs = Inputs(specs, {}, models, HERE, seed=0)
    inputs.keep()
    before = inputs.make()[0][0].clone()
    mutate(inputs.make()[0][0])
    inputs.restore()
    (after,) = inputs.make()[0]
    assert torch.equal(after, before)
    assert after.stride() == (1, 6)


def test_nested_arguments_and_generators_are_made() -> None:
    args = ([torch.ones(2), None], (1, {"a": torch.zeros(1)}), GeneratorSpec("cpu", 9), torch.device("cpu"))
    specs, models = described(*args[:2])
    nested, pair, generator, device = Inputs((*specs, *args[2:]), {}, models, HERE, seed=0).make()[0]
    assert nested[0].tolist() == [1, 1]
    assert nested[1] is None
    assert isinstance(pair, tuple)
    assert pair[1]["a"].tolist() == [0]
    assert generator.initial_seed() == 9
    assert device == torch.device("cpu")


def test_devices_are_mapped_as_requested() -> None:
    to_cpu, to_other = device_map("cuda:0", "cpu"), device_map("cuda:0", "cuda:1")
    assert (to_cpu("cuda:0"), to_cpu("cpu")) == ("cpu", "cpu")
    assert (to_other("cuda:0"), to_other("cpu")) == ("cuda:1", "cpu")
    assert device_map("cpu", "meta")("cpu") == "meta"


@pytest.mark.filterwarnings("ignore:.*quantiz")
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (lambda: torch.ones(3).to_mkldnn(), "layout _mkldnn"),
        (
            lambda: torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.ones(2), 0, torch.quint4x2),
            "dtype quint4x2",
        ),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.0, 0, torch.quint8), "scale that is not positive"),
        (lambda: torch.ones(3, device="meta"), "meta device"),
        (object, "type builtins.object"),
    ],
)
def test_argument_that_cannot_be_made_has_a_reason(argument: Any, message: str) -> None:
    specs, models = described(argument())
    with pytest.raises(Unsupported, match=message):
        Inputs(specs, {}, models, HERE, seed=0)


def test_needed_bytes_are_computed_before_allocation() -> None:
    base = torch.zeros(4, 6)
    specs, _ = described(base, base[1:], torch.zeros(3, dtype=torch.int8), torch.zeros(1).expand(1 << 20))
    assert Inputs.bytes_needed(specs, {}) == 96 + 3 + 4
    assert Inputs.bytes_needed((), {"x": TensorSpec((1 << 40, 1 << 40), (1 << 40, 1), torch.float64, "cpu")}) == 1 << 83
    assert Inputs.bytes_needed((), {"x": TensorSpec((3,), (2,), torch.float32, "cpu")}, torch.float64) == 40


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec((1 << 40, 1 << 40), (0, 0), torch.float32, "cpu"),
        TensorSpec((1 << 40, 1 << 40), (1 << 40, 1), torch.float32, "cpu"),
        TensorSpec((3,), (1,), torch.int64, "cpu", requires_grad=True),
        TensorSpec((3,), (1,), torch.float32, "nowhere"),
        TensorSpec((3,), (1,), torch.quint8, "cpu"),
        TensorSpec((3,), None, torch.float32, "cpu"),
        TensorSpec((3,), None, torch.float32, "cpu", layout=torch.sparse_coo),
        TensorSpec((3,), (1,), torch.float32, "cpu", layout=torch.sparse_coo),
        TensorSpec((3,), (1,), torch.float32, "cpu", layout=torch.jagged),
    ],
    ids=repr,
)
def test_impossible_tensor_spec_is_unsupported(spec: TensorSpec) -> None:
    with pytest.raises(Unsupported):
        Inputs((spec,), {}, {}, HERE, seed=0)


@pytest.mark.parametrize(
    ("recorded", "device", "pinned"),
    [("cuda:0", None, True), ("cuda:0", "cuda:1", True), ("cuda:0", "cpu", False), ("cpu", None, False)],
)
def test_memory_is_pinned_if_replayed_on_an_accelerator(
    recorded: str, device: str | None, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    zeros = torch.zeros

    def pinning(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", pinning)
    plain = TensorSpec((3,), (1,), torch.float32, "cpu", values=0)
    Inputs((replace(plain, pinned=True), plain), {}, {0: Exact([1.0])}, device_map(recorded, device), seed=0)
    assert asked == [pinned, False]


def test_repeated_elements_are_drawn_once() -> None:
    # drawing all of it would exceed the memory
    expanded = TensorSpec((1 << 50, 3), (0, 1), torch.float32, "cpu", values=0)
    windows = TensorSpec((1 << 20, 1 << 20), (1, 1), torch.float32, "cpu", values=0)
    (first, second), _ = Inputs((expanded, windows), {}, {0: Exact([1.0, 2.0, 3.0])}, HERE, seed=0).make()
    assert first[7].tolist() == [1, 2, 3]
    assert second[5, :4].tolist() == [3, 1, 2, 3]


@pytest.mark.parametrize(("op", "repeats"), [("aten.neg.default", True), ("aten.sort.default", False)])
def test_large_floats_repeat_a_piece_unless_values_matter(op: str, repeats: bool) -> None:
    recorded = torch.exp(torch.randn(9, 4, 300, 200))
    specs, models = described(recorded)
    signature, drawable = with_values(Signature(0, OPERATOR, op, specs, {}), models, RECORDED)
    (floats,) = Inputs(signature.args, signature.kwargs, drawable, HERE, seed=0).make()[0]
    # complete images, of some million elements in total
    piece = -(-LONG_PIECE // (4 * 300 * 200))
    assert torch.equal(floats[piece:], floats[: 9 - piece]) is repeats
    assert not torch.equal(floats[1], floats[0])
    assert floats.flatten()[:1_000_000].quantile(0.9) == pytest.approx(
        recorded.flatten()[:1_000_000].quantile(0.9).item(), rel=0.1
    )


def cast_inputs(*args: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, ...]:
    specs, models = described(*args)
    inputs = Inputs(specs, {}, models, HERE, seed=0, dtype=dtype)
    assert inputs.nbytes == Inputs.bytes_needed(specs, {}, dtype)
    return inputs.make()[0]


def test_floats_are_cast_with_their_strides_and_other_dtypes_are_kept() -> None:
    weight = torch.randn(8, 6)[2:, ::2].t()
    args = cast_inputs(
        weight, weight.double(), torch.arange(3), torch.ones(2, dtype=torch.bool), weight.to(torch.complex64)
    )
    assert [tensor.dtype for tensor in args[:2]] == [torch.bfloat16] * 2
    assert [tensor.dtype for tensor in args[2:]] == [torch.int64, torch.bool, torch.complex64]
    assert (args[0].stride(), args[0].storage_offset()) == (weight.stride(), weight.storage_offset())
    assert args[0].untyped_storage().nbytes() == 2 * 47


def test_overflowing_values_become_the_largest_finite_one() -> None:
    lowest = torch.finfo(torch.float32).min
    mask, fill, all_of_it = cast_inputs(
        torch.tensor([0.0, lowest, -math.inf]), lowest, torch.full((100,), lowest), dtype=torch.float16
    )
    assert mask.tolist() == [0.0, -65504.0, -math.inf]
    assert fill == -65504.0
    assert bool(all_of_it.isfinite().all())


def test_memory_viewed_as_several_dtypes_is_not_cast() -> None:
    base = torch.zeros(4, 6)
    with pytest.raises(Unsupported, match="as several dtypes"):
        cast_inputs(base, base.view(torch.int32))
    with pytest.raises(Unsupported, match="as several dtypes"):
        cast_inputs(base, base.view(torch.complex64))
    kept = torch.zeros(4, dtype=torch.int32)
    assert [tensor.dtype for tensor in cast_inputs(kept, kept.view(torch.int8))] == [torch.int32, torch.int8]


def test_dtype_arguments_follow_the_cast() -> None:
    x = torch.ones(3)
    assert cast_inputs(x, torch.float32, torch.float64, torch.int64)[1:] == (torch.bfloat16, torch.float64, torch.int64)
    assert cast_inputs(torch.arange(3), torch.float32)[1] == torch.bfloat16
    assert cast_inputs(3, torch.int64) == (3, torch.int64)


anything = st.integers(-(2**40), 2**40)


@st.composite
def rows(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    """Draw lengths of any value, their upper limit and their required sum."""
    batch, count, most = draw(st.integers(1, 3)), draw(st.integers(1, 8)), draw(st.integers(0, 9))
    drawn = draw(st.lists(anything | st.integers(0, most), min_size=batch * count, max_size=batch * count))
    return torch.tensor(drawn).reshape(batch, count), most, draw(st.integers(0, count * most))


@given(rows())
def test_fitted_lengths_are_valid_and_have_the_requested_sum(case: tuple[torch.Tensor, int, int]) -> None:
    drawn, most, total = case
    lengths = fitting_lengths(drawn, most, total)
    assert lengths.shape == drawn.shape
    assert bool(((lengths >= 0) & (lengths <= most)).all())
    assert set(lengths.sum(-1).tolist()) == {total}


@given(rows())
def test_valid_lengths_are_unchanged(case: tuple[torch.Tensor, int, int]) -> None:
    drawn, most, total = case
    lengths = fitting_lengths(drawn, most, total)
    assert torch.equal(fitting_lengths(lengths, most, total), lengths)


def test_lengths_are_valid_beyond_the_precision_of_floats() -> None:
    most = (1 << 59) // 3
    lengths = fitting_lengths(torch.tensor([0, most, 1]), most, 2 * most + 7)
    assert int(lengths.sum()) == 2 * most + 7
    assert int(lengths.max()) <= most


@given(rows(), st.randoms(use_true_random=False))
def test_columns_ascend_in_each_row_without_duplicates(case: tuple[torch.Tensor, int, int], random: object) -> None:
    drawn, most, total = case
    lengths = fitting_lengths(drawn, most, total).reshape(-1)
    values = [random.randrange(-20, 20) for _ in range(int(lengths.sum()))]  # type: ignore[attr-defined]
    columns = distinct_in_rows(torch.tensor(values, dtype=torch.int64), lengths, most)
    for row in columns.split(lengths.tolist()):
        assert row.tolist() == sorted(set(row.tolist()))
        assert all(0 <= column < most for column in row.tolist())
    assert torch.equal(distinct_in_rows(columns, lengths, most), columns)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_places_ascend_without_duplicates(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, torch.Size(sizes).numel()))
    drawn = torch.stack(
        [torch.tensor(data.draw(st.lists(st.integers(0, size - 1), min_size=count, max_size=count))) for size in sizes]
    ).long()
    places = [tuple(place) for place in distinct_places(drawn, tuple(sizes)).t().tolist()]
    assert len(places) == count
    assert places == sorted(set(places))
    assert all(0 <= index < size for place in places for index, size in zip(place, sizes, strict=True))


DTYPES = [torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.uint64, torch.bool, torch.float8_e5m2]


def test_doubles_and_the_largest_integers_are_kept_exactly() -> None:
    for tensor in (
        torch.tensor([math.pi, 1e300, 5e-324], dtype=torch.float64),
        torch.tensor([2**64 - 1, 2**63, 0], dtype=torch.uint64),
        torch.tensor([-(2**63), 2**63 - 1]),
        torch.tensor([complex(math.nan, math.inf), 1j], dtype=torch.complex128),
    ):
        assert torch.equal(drawn(fitted(tensor, Exact), tensor).view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_tensor_of_any_dtype_is_kept_exactly(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert torch.equal(drawn(fitted(tensor, Exact), tensor).view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0, 1])
def test_constant_of_any_dtype_is_kept_exactly(dtype: torch.dtype, value: int) -> None:
    tensor = torch.full((20, 30), value).to(dtype)
    assert torch.equal(drawn(fitted(tensor, Constant), tensor).view(torch.uint8), tensor.view(torch.uint8))


@given(st.integers(65, 5000), st.floats(0.01, 0.99), st.floats(0, 0.99), st.integers(0, 9))
def test_booleans_keep_their_count_and_number_of_runs(count: int, share: float, stay: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # runs of equal values, longer the more likely an element equals the one before
    pieces = (torch.rand(count, generator=generator) >= stay).cumsum(0)
    tensor = (torch.rand(count + 1, generator=generator) < share)[pieces]
    tensor[0], tensor[-1] = True, False
    model = fitted(tensor, Booleans)
    assert fit(drawn(model, tensor)) == model


@given(st.integers(20, 400), st.integers(2, 100), st.sampled_from([torch.bool, torch.int64, torch.float16]))
def test_one_hot_rows_stay_one_hot_in_their_classes(rows: int, classes: int, dtype: torch.dtype) -> None:
    at = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(rows)) // 2
    at[0], at[-1] = 0, 1
    tensor = torch.nn.functional.one_hot(at, classes).to(dtype)
    if tensor.numel() <= 64:
        return
    again = drawn(fitted(tensor, OneHot), tensor)
    assert bool((again.float().sum(-1) == 1).all())
    assert torch.equal(again.float().sum(0), tensor.float().sum(0))


def test_fitting_draws_no_random_number_and_changes_nothing() -> None:
    tensors = [torch.randn(300), torch.randint(0, 9, (300,)), torch.rand(300, 4), torch.rand(300) > 0.5]
    tensors += [torch.randperm(300), torch.randn(40, 40).softmax(-1), torch.eye(20), torch.arange(300)]
    before = [tensor.clone() for tensor in tensors]
    state = torch.get_rng_state()
    for tensor in tensors:
        fit(tensor, requested_kinds=value_models.names())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


def test_drawing_uses_only_its_generator() -> None:
    tensors = [torch.randn(300).relu(), torch.randint(0, 9, (300,)), torch.rand(300) > 0.5, torch.randperm(300)]
    state = torch.get_rng_state()
    for tensor in tensors:
        model = fit(tensor)
        assert model is not None
        assert torch.equal(drawn(model, tensor, 3), drawn(model, tensor, 3))
        assert not torch.equal(drawn(model, tensor, 3), drawn(model, tensor, 4))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("view", ["transposed", "expanded", "stepped", "conjugated"])
def test_view_is_fitted_by_its_elements(view: str) -> None:
    tensor = torch.randn(40, 40, dtype=torch.complex64 if view == "conjugated" else torch.float32)
    shown = {
        "transposed": lambda: tensor.T,
        "expanded": lambda: tensor[:, :1].expand(40, 40),
        "stepped": lambda: tensor[::2, ::3],
        "conjugated": lambda: tensor.conj(),
    }[view]()
    assert fit(shown) == fit(shown.resolve_conj().contiguous())


OLD = {
    "exact": {"data": [1, 2.5]},
    "booleans": {"true": 3, "total": 10},
    "integers": {"frequent": [[7, 5]], "low": 0, "high": 9, "others": 60, "ascending": True},
    "boxes": {"first": 0, "low": [0] * 4, "high": [9.5] * 4, "whole": [False] * 4},
    "floats": {"mean": 0, "std": 1, "low": -2, "high": 2, "zeros": 0.5, "nan": 0, "inf": 0, "minus_inf": 0},
}


@pytest.mark.parametrize("name", OLD)
def test_model_of_the_first_format_is_read_and_drawn(name: str) -> None:
    model = value_model_from_json({"type": "values", "id": 3, "model": name, "later": {"unheard": "of"}, **OLD[name]})
    assert model.draw((13, 4), torch.float32, torch.Generator()).shape == (13, 4)
    assert read_again(model) == model
    assert OLD[name].items() <= value_model_to_json(model).items()


REFUSED_OTHERWISE = """\
Operator: aten.bernoulli.default
cnt: 1, ((T([20, 3], f32),), {})
Operator: aten.multinomial.default
cnt: 1, ((T([20, 30], f32), 4), {})
Operator: aten.binary_cross_entropy.default
cnt: 1, ((T([20, 3], f32), T([20, 3], f32)), {})
Operator: aten.poisson.default
cnt: 1, ((T([10, 20], f32),), {})
Operator: aten.linalg_cholesky.default
cnt: 1, ((T([2, 20, 20], f64),), {})
Operator: aten.div.Tensor_mode
cnt: 1, ((T([20, 20], i64), T([20, 20], i64)), {'rounding_mode': 'floor'})
Operator: aten.index_put.default
cnt: 1, ((T([100, 5], f32), [T([100], b8)], T([40, 5], f32)), {})
cnt: 1, ((T([100, 5], f32), [T([30], i64), T([30], i64)], T([30], f32)), {})
Operator: aten._pack_padded_sequence.default
cnt: 1, ((T([20, 5, 7], f32), T([5], i64), False), {})
Operator: aten.repeat_interleave.Tensor
cnt: 1, ((T([20], i64),), {'output_size': 60})
Operator: aten._assert_async.default
cnt: 1, ((T([], b8),), {})
Operator: aten.max_unpool2d.default
cnt: 1, ((T([2, 3, 4, 4], f32), T([2, 3, 4, 4], i64), [8, 8]), {})
Operator: aten._embedding_bag.default
cnt: 1, ((T([1000, 64], f32), T([200], i64), T([10], i64)), {})
"""


def values_of(op: str, *args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
    signature, models = with_values(Signature(0, OPERATOR, op, args, kwargs), {}, RECORDED)
    made, named = Inputs(signature.args, signature.kwargs, models, device_map("cpu", None), 0).make()
    flat = [*made, *named.values()]
    items = (item for each in flat for item in (each if isinstance(each, list) else [each]))
    return tuple(item for item in items if isinstance(item, torch.Tensor))


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, torch.empty(shape, device="meta").stride(), dtype, "cpu")


def test_operators_accept_their_default_values(tmp_path: Path) -> None:
    (tmp_path / "calls.txt").write_text(REFUSED_OTHERWISE)
    for signature in load(tmp_path / "calls.txt").signatures:
        signature, models = with_values(signature, {}, RECORDED)
        args, kwargs = Inputs(signature.args, signature.kwargs, models, device_map("cpu", None), 0).make()
        operator_of(signature)(*args, **kwargs)


def test_default_row_indices_cover_the_table() -> None:
    _, indices = values_of("aten.embedding.default", tensor(1000, 4), tensor(50, 20, dtype=torch.int64))
    assert int(indices.min()) >= 0
    assert int(indices.max()) < 1000
    assert len(indices.unique()) > 500
    _, picked = values_of("aten.index.Tensor", tensor(7, 900), [None, tensor(500, dtype=torch.int64)])
    assert len(picked.unique()) > 300
    assert int(picked.max()) < 900


def test_default_mask_has_half_or_the_recorded_number_of_true() -> None:
    _, mask = values_of("aten.masked_fill.Scalar", tensor(10, 10), tensor(10, 10, dtype=torch.bool), 0)
    assert int(mask.sum()) == 50
    signature = ("aten.nonzero.default", (tensor(100, dtype=torch.bool),), {}, tensor(7, 1, dtype=torch.int64))
    (model,) = default_values(*signature)[2].values()
    drawn = model.draw((100,), torch.bool, torch.Generator().manual_seed(0))
    assert int(drawn.sum()) == 7


def test_recorded_values_and_unknown_calls_are_unchanged() -> None:
    recorded = TensorSpec((4,), (1,), torch.bool, "cpu", values=3)
    args, kwargs, models = default_values("aten.logical_not.default", (recorded,), {})
    assert (args, kwargs, models) == ((recorded,), {}, {})
    assert default_values("mmcv.nms.default", (tensor(4),), {}) == ((tensor(4),), {}, {})
    # an operator called with nonsense
    assert default_values("aten.gather.default", (1, "x", tensor(4, dtype=torch.int64)), {})[2] == {}


def test_every_default_refers_to_existing_arguments() -> None:
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")]
    named = [
        (f"aten.{schema.name.removeprefix('aten::')}.{schema.overload_name or 'default'}", argument.name)
        for schema in schemas
        for argument in schema.arguments
        if "Tensor" in str(argument.type)
    ]
    for op, patterns in ((op, row.argument.split("|")) for row in DEFAULTS for op in row.op.split("|")):
        if op.startswith("aten.") and not is_removed(op):
            arguments = {argument for name, argument in named if fnmatchcase(name, op)}
            assert any(fnmatchcase(item, pattern) for item in arguments for pattern in patterns), op
