"""Checks of a mode's results against eager: rounding, randomness, ties and TF32 are accepted, other errors are not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from optional import slow_except
from torch import Tensor

from opgrip.platform.precisions import read_precision
from opgrip.replay.modes import RunOutputs
from opgrip.replay.operators import contexts as tf32
from opgrip.replay.operators.contexts import restored
from opgrip.replay.run.checks.permitted_differences import GENERATOR_OUTPUTS
from opgrip.replay.run.checks.reference import Reference, observe
from opgrip.replay.run.checks.verdicts import ResultVerdict, Tolerance
from opgrip.traces.schema.arguments import map_leaves

Function = Callable[..., Any]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


X, Y, Z = drawn(64, 100), drawn(64, 100, seed=1), drawn(100, 48, seed=2)
IMAGE, KERNEL = drawn(2, 8, 16, 16), drawn(12, 8, 3, 3, seed=3)
HALF, SMALL = X.half(), X.bfloat16()
WHOLE = torch.arange(64 * 100).reshape(64, 100) % 37
C = torch.complex(X, Y)
aten = torch.ops.aten

CALLS: dict[str, tuple[Function, tuple[Any, ...]]] = {
    "add": (aten.add.Tensor, (X, Y)),
    "mul_half": (aten.mul.Tensor, (HALF, HALF)),
    "div": (aten.div.Tensor, (X, Y)),
    "div_floor": (aten.div.Tensor_mode, (X, Y)),
    "exp": (aten.exp.default, (X * 10,)),
    "log": (aten.log.default, (X,)),
    "sqrt": (aten.sqrt.default, (X,)),
    "sigmoid": (aten.sigmoid.default, (SMALL,)),
    "gelu": (aten.gelu.default, (SMALL,)),
    "gelu_float": (aten.gelu.default, (X,)),
    "silu": (aten.silu.default, (HALF,)),
    "tanh": (aten.tanh.default, (X,)),
    "hardswish": (aten.hardswish.default, (X,)),
    "leaky_relu": (aten.leaky_relu.default, (X,)),
    "clamp": (aten.clamp.default, (X, -1.0, 1.0)),
    "where": (aten.where.self, (X > 0, X, Y)),
    "addcmul": (aten.addcmul.default, (X, X, Y)),
    "lerp": (aten.lerp.Scalar, (X, Y, 0.3)),
    "softmax": (aten._softmax.default, (X, -1, False)),
    "softmax_bfloat16": (aten._softmax.default, (SMALL, -1, False)),
    "log_softmax": (aten._log_softmax.default, (X * 20, -1, False)),
    "layer_norm": (aten.native_layer_norm.default, (X, [100], None, None, 1e-5)),
    "layer_norm_half": (aten.native_layer_norm.default, (HALF, [100], None, None, 1e-5)),
    "batch_norm": (aten.native_batch_norm.default, (IMAGE, None, None, None, None, True, 0.1, 1e-5)),
    "group_norm": (aten.native_group_norm.default, (IMAGE, None, None, 2, 8, 256, 4, 1e-5)),
    "var_mean": (aten.var_mean.correction, (X + 100, [1])),
    "std": (aten.std.correction, (X, [0])),
    "sum": (aten.sum.dim_IntList, (X, [1])),
    "sum_half": (aten.sum.dim_IntList, (HALF, [1])),
    "mean": (aten.mean.default, (X,)),
    "cumsum": (aten.cumsum.default, (X, 1)),
    "prod": (aten.prod.dim_int, (X, 1)),
    "amax": (aten.amax.default, (X, [1])),
    "norm": (aten.linalg_vector_norm.default, (X, 2.0, [1])),
    "logsumexp": (aten.logsumexp.default, (X * 30, [1])),
    "mm": (aten.mm.default, (X, Z)),
    "mm_bfloat16": (aten.mm.default, (SMALL, Z.bfloat16())),
    "addmm": (aten.addmm.default, (torch.ones(48), X, Z)),
    "bmm": (aten.bmm.default, (X.reshape(4, 16, 100), X.reshape(4, 100, 16))),
    "conv": (aten.convolution.default, (IMAGE, KERNEL, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    "max_pool": (aten.max_pool2d_with_indices.default, (IMAGE, [3, 3], [2, 2], [1, 1])),
    "avg_pool": (aten.avg_pool2d.default, (IMAGE, [3, 3], [2, 2])),
    "upsample": (aten.upsample_bilinear2d.vec, (IMAGE, [31, 29], False, None)),
    "upsample_nearest": (aten.upsample_nearest2d.vec, (IMAGE, [31, 29], None)),
    "grid_sample": (aten.grid_sampler_2d.default, (IMAGE, X[:40].reshape(2, 10, 100, 2), 0, 0, False)),
    "sort": (aten.sort.default, (WHOLE, 1)),
    "topk": (aten.topk.default, (WHOLE, 7, 1)),
    "max": (aten.max.dim, (WHOLE, 1)),
    "argmax": (aten.argmax.default, (WHOLE,)),
    "gather": (aten.gather.default, (X, 1, WHOLE)),
    "index": (aten.index.Tensor, (X, [WHOLE[0], WHOLE[1]])),
    "index_add": (aten.index_add.default, (X, 0, WHOLE[0], drawn(100, 100))),
    "embedding": (aten.embedding.default, (X, WHOLE)),
    "cat": (aten.cat.default, ([X, Y], 1)),
    "split": (aten.split.Tensor, (X, 30)),
    "nonzero": (aten.nonzero.default, (WHOLE > 30,)),
    "eq": (aten.eq.Tensor, (WHOLE, WHOLE.t().reshape(64, 100))),
    "complex_mul": (aten.mul.Tensor, (C, C)),
    "fft": (aten._fft_c2c.default, (C, [1], 0, True)),
    "roll": (aten.roll.default, (X, [3], [1])),
    "cross_entropy": (F.cross_entropy, (X, WHOLE[:, 0])),
    "smooth_l1": (F.smooth_l1_loss, (X, Y)),
    "attention": (F.scaled_dot_product_attention, tuple(IMAGE[None] for _ in range(3))),
    "ratio": (lambda a, b: (a - b).clamp(min=0).sum(-1) / ((a + b).abs().sum(-1) + 1e-6), (X, Y)),
    "normalize": (lambda a: (a - a.mean()) / a.std(), (X,)),
}
KEYWORDS: dict[str, dict[str, Any]] = {
    "div_floor": {"rounding_mode": "floor"},
    "gelu": {"approximate": "tanh"},
    "gelu_float": {"approximate": "tanh"},
    "var_mean": {"correction": 1},
    "std": {"correction": 1},
}


def made(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    def fresh(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    return lambda: (map_leaves(fresh, args), map_leaves(fresh, kwargs))


def reference(function: Any, *args: Any, mutates: bool = False, **kwargs: Any) -> Reference:
    op = str(function) if isinstance(function, torch._ops.OpOverload) else None
    return Reference(function, made(*args, **kwargs), mutates, op)


def checked(function: Any, *args: Any, met: Any, mutates: bool = False, **kwargs: Any) -> ResultVerdict:
    if callable(met):
        met = observe(met, made(*args, **kwargs)(), mutates)
    elif not isinstance(met, RunOutputs):
        met = RunOutputs(list(met) if isinstance(met, list | tuple) else [met])
    return reference(function, *args, mutates=mutates, **kwargs).check(met, Tolerance())


def assert_right(function: Any, *args: Any, **kwargs: Any) -> ResultVerdict:
    verdict = checked(function, *args, **kwargs)
    assert verdict.right, verdict.reason
    return verdict


def assert_wrong(function: Any, *args: Any, **kwargs: Any) -> ResultVerdict:
    verdict = checked(function, *args, **kwargs)
    assert not verdict.right
    assert verdict.reason
    return verdict


def one_by_one(numbers: Tensor) -> Tensor:
    return torch.from_numpy(np.add.accumulate(numbers.flatten().numpy())[-1:])[0]


@pytest.mark.parametrize("name", slow_except([*CALLS][::8], CALLS))
def test_compiled_result_is_right(name: str) -> None:
    function, args = CALLS[name]
    kwargs = KEYWORDS.get(name, {})
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args, **kwargs: function(*args, **kwargs), backend="aot_eager_decomp_partition")
    verdict = checked(function, *args, met=compiled, **kwargs)
    assert verdict.right, verdict.reason


def test_other_summation_order_is_right() -> None:
    one, other = drawn(16, 10_000), drawn(10_000, 16, seed=1)
    many = drawn(1_000_000)
    assert_right(aten.mm.default, one, other, met=lambda a, b: a.flip(1) @ b.flip(0))
    assert_right(aten.mm.default, one, other, met=lambda a, b: sum(a[:, i::100] @ b[i::100] for i in range(100)))
    assert_right(aten.sum.default, many, met=one_by_one)
    assert_right(aten.sum.default, many[:10_000].abs(), met=one_by_one)
    assert_right(aten.sum.default, many, met=lambda a: a.reshape(1000, 1000).sum(0).flip(0).sum())
    assert_right(aten.cumsum.default, many[:5000], 0, met=lambda a, dim: a.double().cumsum(dim).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_unrounded_intermediate_results_are_right(dtype: torch.dtype) -> None:
    def chain(a: Tensor) -> Tensor:
        return ((a.exp() + 1).log() - a.sigmoid() * a.tanh()) / (a * a + 0.1).sqrt() - a.cos()

    numbers = drawn(50, 100).to(dtype)
    assert_right(chain, numbers, met=lambda a: chain(a.float()).to(dtype))
    assert_wrong(chain, numbers, met=lambda a: (chain(a.float()) * 1.1).to(dtype))


def test_cancellation_is_right_and_other_errors_are_wrong() -> None:
    numbers = drawn(50, 1000) + 1000
    off = [numbers.var(1) * (1 + 1e-3)]
    assert_right(aten.var.correction, numbers, [1], met=lambda a, dim: a.double().var(dim).float())
    assert_wrong(aten.var.correction, numbers, [1], met=off)


def test_decisions_that_depend_on_rounding_may_differ() -> None:
    def count(a: Tensor) -> tuple[Tensor, Tensor]:
        return (a * 10).floor().long(), a * 10 >= 3

    tenths = torch.arange(100).float() / 10
    near = [(tenths * 10.000001).floor().long(), tenths * 9.999999 >= 3]
    assert_right(count, tenths, met=near)
    assert_right(count, tenths, met=[near[0] - (torch.arange(100) == 50).long(), near[1]])
    assert_wrong(count, tenths + 0.05, met=[near[0] + (torch.arange(100) == 50).long(), near[1]])
    assert_wrong(count, tenths, met=[near[0] + 2 * (torch.arange(100) == 50).long(), near[1]])


def one_off(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[tensor.numel() // 3] += 0.05
    return tensor


def swapped(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[[3, 40]] = tensor.view(-1)[[40, 3]]
    return tensor


def with_nan(tensor: Tensor) -> Tensor:
    return tensor.masked_fill(torch.arange(tensor.numel()).reshape(tensor.shape) == 7, torch.nan)


ERRORS: list[Callable[[Tensor], Any]] = [
    *(one_off, swapped, with_nan, lambda a: a * (1 + 1e-3)),
    *(lambda a: a.roll(1, -1), lambda a: a.mT, lambda a: a.double(), lambda a: a[None], lambda a: a[:-1]),
    *(lambda a: a.half().float(), lambda a: torch.zeros_like(a), lambda a: a.masked_fill(a == a.max(), torch.inf)),
]
FLOATS = {
    "add": (aten.add.Tensor, (drawn(32, 32), drawn(32, 32, seed=1))),
    "mm": (aten.mm.default, (drawn(32, 5000), drawn(5000, 32, seed=1))),
    "softmax": (aten._softmax.default, (drawn(32, 32) * 3, -1, False)),
    "normed": (lambda a: (a - a.mean(1, keepdim=True)) / a.std(1, keepdim=True), (drawn(32, 32),)),
}


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("error", ERRORS)
def test_planted_errors_are_wrong(name: str, error: Callable[[Tensor], Any]) -> None:
    function, args = FLOATS[name]
    assert_wrong(function, *args, met=lambda *args: error(function(*args)))


def test_reason_names_the_output_and_the_element() -> None:
    def two(a: Tensor) -> tuple[Tensor, Tensor]:
        return a, a * 2

    met = (torch.ones(8, 8), torch.ones(8, 8) * 2)
    met[1][3, 7] = 2.5
    verdict = checked(two, torch.ones(8, 8), met=met)
    assert verdict.reason == "output 1: 1 of 64 elements differ, by 0.5 (rel 0.25) at most, at [3, 7]"
    assert (verdict.max_abs, verdict.max_rel) == (0.5, 0.25)
    assert checked(two, torch.ones(8, 8), met=met[:1]).reason == "1 output tensor instead of 2"


def test_absolute_tolerance_does_not_hide_errors_of_small_numbers() -> None:
    assert_wrong(aten.mul.Tensor, drawn(32, 32) * 1e-7, 1.0, met=lambda a, b: a * 1.001)


def test_tolerance_of_the_user_is_respected() -> None:
    met = RunOutputs([drawn(32, 32) * 1.05])
    assert reference(aten.mul.Tensor, drawn(32, 32), 1.0).check(met, Tolerance(rtol=0.1)).right
    assert not reference(aten.mul.Tensor, drawn(32, 32), 1.0).check(met, Tolerance(rtol=0.01, atol=0.01)).right


def test_non_tensor_results_are_compared_if_a_mode_returns_them() -> None:
    def sizes(a: Tensor) -> tuple[Any, ...]:
        return a + 1, a.numel(), float(a.sum()), "name", None

    numbers = drawn(8, 8)
    assert_right(sizes, numbers, met=[numbers + 1])
    assert_right(sizes, numbers, met=[numbers + 1, 64, float(numbers.flip(0).sum()), "name", None])
    assert_right(sizes, numbers, met=[numbers + 1, torch.tensor(64), numbers.sum(), "name", None])
    assert_wrong(sizes, numbers, met=[numbers + 1, 65, float(numbers.sum()), "name", None])
    assert_wrong(sizes, numbers, met=[numbers + 1, 64, float(numbers.sum()) + 0.1, "name", None])
    assert_wrong(sizes, numbers, met=[numbers + 1, 64, float(numbers.sum()), "game", None])


def test_written_arguments_are_compared() -> None:
    one, other = drawn(32, 32), drawn(32, 32, seed=1)
    done = one + other
    assert_right(aten.add_.Tensor, one, other, mutates=True, met=RunOutputs([done], [done, other]))
    assert_wrong(aten.add_.Tensor, one, other, mutates=True, met=RunOutputs([done], [one, other]))
    assert_wrong(aten.add_.Tensor, one, other, mutates=True, met=RunOutputs([done], [done, done]))
    assert_wrong(aten.add_.Tensor, one, other, mutates=True, met=RunOutputs([done]))
    assert_right(lambda a: a + 1, one, mutates=True, met=RunOutputs([one + 1]))
    slow = RunOutputs([one_by_one(one)[None]], [one_by_one(one)[None], one])
    assert_right(lambda out, a: out.add_(a.sum()), torch.zeros(1), one, mutates=True, met=slow)


def test_any_of_equal_elements_may_be_chosen() -> None:
    sets = torch.arange(60).reshape(3, 20) % 5
    numbers = sets.float().masked_fill(sets == 4, torch.nan)
    last = 19 - sets.flip(1).argmax(1)
    for source in (sets, numbers):
        values, indices = source.flip(1).sort(dim=1, stable=True)
        assert_right(aten.sort.default, source, 1, met=[values, 19 - indices])
        assert_right(aten.sort.stable, source, stable=False, dim=1, met=[values, 19 - indices])
        assert_wrong(aten.sort.stable, source, stable=True, dim=1, met=[values, 19 - indices])
        twice = (19 - indices).index_copy(1, torch.tensor([1]), (19 - indices)[:, :1])
        assert_wrong(aten.sort.default, source, 1, met=[values, twice])
        assert_wrong(aten.sort.default, source, 1, met=[values, 20 - indices])
        assert_wrong(aten.sort.default, source, 1, met=[values, (20 - indices) % 20])
        assert_right(aten.argsort.default, source, 1, met=19 - indices)
    assert_right(aten.max.dim, sets, 1, met=[sets.amax(1), last])
    assert_right(aten.argmax.default, sets, 1, met=last)
    assert_right(aten.argmax.default, sets, met=torch.tensor(59))
    assert_wrong(aten.argmax.default, sets, met=torch.tensor(58))
    assert_wrong(aten.max.dim, sets, 1, met=[sets.amax(1), last - 1])
    assert_wrong(aten.max.dim, sets, 1, met=[sets.amax(1) - 1, last])
    assert_wrong(aten.max.dim, sets, 1, met=[sets.amax(1), last.int()])
    top = sets.flip(1).topk(6, 1)
    assert_right(aten.topk.default, sets, 6, 1, met=[top.values, 19 - top.indices])
    assert_wrong(aten.topk.default, sets, 6, 1, met=[top.values.flip(1), (19 - top.indices).flip(1)])
    unsorted = [top.values.flip(1), (19 - top.indices).flip(1)]
    assert_right(aten.topk.default, sets, 6, 1, True, False, met=unsorted)
    assert_wrong(aten.topk.default, sets, 6, 1, True, False, met=[unsorted[0], unsorted[1].roll(1, 1)])
    first = torch.zeros(20, dtype=torch.int64)
    assert_right(aten.cummax.default, torch.ones(20), 0, met=[torch.ones(20), first])
    assert_wrong(aten.cummax.default, torch.ones(20), 0, met=[torch.ones(20), first + 1])


def test_pooling_may_choose_any_maximum_of_its_window() -> None:
    args = (torch.ones(1, 2, 6, 6), [3, 3], [2, 2], [1, 1])
    values, indices = aten.max_pool2d_with_indices.default(*args)
    last = torch.tensor([[7, 9, 11], [19, 21, 23], [31, 33, 35]]).expand(1, 2, 3, 3)
    assert_right(aten.max_pool2d_with_indices.default, *args, met=[values, last])
    assert_wrong(aten.max_pool2d_with_indices.default, *args, met=[values, last - 6 * 3])
    assert_wrong(aten.max_pool2d_with_indices.default, *args, met=[values, (last + 12) % 36])
    other = (drawn(1, 2, 6, 6), *args[1:])
    assert_wrong(aten.max_pool2d_with_indices.default, *other, met=lambda *args: (F.max_pool2d(*args), last))
    assert indices.shape == last.shape


NUMBERS = drawn(100, 100)
RANDOM: dict[str, tuple[Any, tuple[Any, ...], list[Callable[[Tensor], Tensor]]]] = {
    "rand": (aten.rand.default, ([100, 100],), [lambda a: a * 0.9, lambda a: a.round(), lambda a: a - 0.1]),
    "randn": (aten.randn.default, ([100, 100],), [lambda a: a + 0.1, lambda a: a * 0.8, lambda a: a.abs()]),
    "few": (aten.randn.default, ([12],), [torch.zeros_like, lambda a: a.fill_(0.3), lambda a: a * torch.nan]),
    "bernoulli": (aten.bernoulli.p, (NUMBERS, 0.3), [torch.ones_like, lambda a: 1 - a, lambda a: a * 2]),
    "randint": (aten.randint.low, (3, 9, [100, 100]), [lambda a: a + 1, lambda a: a.clamp(max=7)]),
    "randperm": (aten.randperm.default, (100,), [torch.zeros_like, lambda a: a % 99, lambda a: a + 1]),
    "multinomial": (aten.multinomial.default, (NUMBERS.abs(), 5), [torch.zeros_like, lambda a: a // 2]),
    "dropout": (F.dropout, (NUMBERS,), [lambda a: a * 1.1, lambda a: a.roll(1, 1), lambda a: a * 0]),
    "native_dropout": (aten.native_dropout.default, (NUMBERS, 0.2, True), [one_off, swapped, lambda a: a * 1.001]),
    "noise": (lambda a: a * 100 + torch.rand_like(a), (NUMBERS,), [lambda a: a + 0.1, torch.clone, swapped]),
    "shared": (lambda a: a * torch.rand(()), (NUMBERS,), [lambda a: -a * torch.inf]),
}


@pytest.mark.parametrize("name", slow_except(["few"], RANDOM))
def test_random_results_are_compared_by_their_distribution(name: str) -> None:
    function, args, errors = RANDOM[name]
    state = torch.get_rng_state()
    judge = reference(function, *args)
    for seed in range(100, 106):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            met = observe(function, made(*args)(), False)
        verdict = judge.check(met, Tolerance())
        assert verdict.right, verdict.reason
        assert torch.equal(torch.get_rng_state(), state)
    if name == "noise":
        errors = errors[:1]
    for error in errors:
        planted = RunOutputs([error(met.outputs[0]), *met.outputs[1:]])
        assert not judge.check(planted, Tolerance()).right
    planted = RunOutputs([met.outputs[0].to(torch.complex64), *met.outputs[1:]])
    assert not judge.check(planted, Tolerance()).right


@pytest.mark.slow
def test_dropout_that_rounds_otherwise_is_right() -> None:
    numbers = drawn(300, 1000)
    judge = reference(aten.native_dropout.default, numbers, 0.25, True)
    kept = torch.rand(300, 1000, generator=torch.Generator().manual_seed(9)) >= 0.25
    # the operator multiplies by the reciprocal
    verdict = judge.check(RunOutputs([numbers * kept / 0.75, kept]), Tolerance())
    assert verdict.right, verdict.reason


def test_deterministic_output_next_to_random_ones_is_compared() -> None:
    def both(a: Tensor) -> tuple[Tensor, Tensor]:
        return a + 1, torch.rand_like(a)

    noise = torch.rand(100, 100, generator=torch.Generator().manual_seed(9))
    assert_right(both, NUMBERS, met=[NUMBERS + 1, noise])
    assert_wrong(both, NUMBERS, met=[(NUMBERS + 1) * 1.001, noise])
    assert_wrong(both, NUMBERS, met=[NUMBERS + 1, noise * 0.9])


def test_uninitialized_memory_is_not_compared() -> None:
    assert_right(aten.empty.memory_format, [10], met=torch.ones(10))
    assert_right(aten.new_empty.default, drawn(3), [10], met=torch.full((10,), torch.nan))
    assert_wrong(aten.empty.memory_format, [10], met=torch.ones(11))
    assert_wrong(aten.empty_like.default, drawn(10), met=torch.ones(10).double())
    assert_wrong(aten.zeros_like.default, drawn(10), met=torch.ones(10))


UNUSUAL = {
    "quantized": lambda a: torch.quantize_per_tensor(a, 0.05, 10, torch.quint8),
    "by_channel": lambda a: torch.quantize_per_channel(
        a, torch.rand(6) + 0.1, torch.zeros(6, dtype=torch.int64), 0, torch.qint8
    ),
    "sparse": lambda a: a.relu().to_sparse(),
    "csr": lambda a: a.relu().to_sparse_csr(),
    "nested": lambda a: torch.nested.nested_tensor([a[:2], a[2:5]]),
    "jagged": lambda a: torch.nested.nested_tensor([a[:2], a[2:5]], layout=torch.jagged),
    "float8": lambda a: a.to(torch.float8_e4m3fn),
    "complex": lambda a: torch.complex(a, a + 1).conj(),
    "complex32": lambda a: torch.complex(a, a + 1).to(torch.complex32),
    "uint64": lambda a: a.abs().mul(100).to(torch.uint64),
    "bool": lambda a: a > 0,
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_tensors_of_any_kind_are_compared(name: str) -> None:
    numbers = drawn(6, 8)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        same, other = UNUSUAL[name](numbers), UNUSUAL[name](1.5 - numbers)
    assert_right(lambda a: same, numbers, met=same)
    verdict = assert_wrong(lambda a: same, numbers, met=other)
    assert "cannot be compared" not in verdict.reason


def test_result_that_cannot_be_compared_is_wrong_with_the_reason() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise ValueError("no such comparison")

        __hash__ = None

    assert checked(lambda: Odd(), met=Odd()).reason == "cannot be compared: ValueError: no such comparison"
    fails = reference(aten.mm.default, drawn(2, 3), drawn(2, 3)).check(RunOutputs([drawn(2, 2)]), Tolerance())
    assert fails.reason.startswith("cannot be compared: RuntimeError")


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8]


@given(st.sampled_from([*DTYPES, torch.bool]), st.lists(st.integers(0, 5), max_size=4), st.integers(0, 1000))
def test_result_equals_itself_and_not_a_perturbed_one(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    numbers = (drawn(*shape, seed=seed) * 10).abs().to(dtype)
    assert_right(torch.clone, numbers, met=numbers.clone())
    if numbers.numel() and dtype is not torch.bool:
        perturbed = numbers.clone()
        perturbed.view(-1)[seed % numbers.numel()] += 3
        assert_wrong(torch.clone, numbers, met=perturbed)


SCHEMAS = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")]


def attention_operators() -> list[torch._ops.OpOverload]:
    found = [schema for schema in SCHEMAS if {item.name for item in schema.returns} & GENERATOR_OUTPUTS]
    return [getattr(getattr(aten, schema.name[6:]), schema.overload_name or "default") for schema in found]


@pytest.mark.parametrize("share", slow_except([0.5], [0.0, 0.5]))
@pytest.mark.parametrize("operator", slow_except(attention_operators()[:2], attention_operators()), ids=str)
def test_attention_is_compared_without_its_generator_state(operator: torch._ops.OpOverload, share: float) -> None:
    names = [item.name for item in operator._schema.returns]
    query = torch.rand(2, 3, 40, 8, generator=torch.Generator().manual_seed(0))
    required = {
        item.name: None if isinstance(item.type, torch.OptionalType) else 0
        for item in operator._schema.arguments
        if not item.has_default_value()
    }
    arguments = required | {"query": query, "key": query, "value": query, "dropout_p": share}

    def attend(**kwargs: Any) -> tuple[Any, ...]:
        """Imitate the operator, which only a GPU has."""
        weights = F.dropout((kwargs["query"] @ kwargs["key"].mT).softmax(-1), kwargs["dropout_p"])
        outputs: dict[str, Any] = dict.fromkeys(names, torch.ones(2))
        outputs |= {names[0]: weights @ kwargs["value"], names[1]: weights.new_ones(2, 3, 40)}
        outputs |= {name: torch.randint(1 << 40, ()) for name in names if name in GENERATOR_OUTPUTS}
        return tuple(outputs.values())

    def check(**changes: Any) -> ResultVerdict:
        results = dict(zip(names, attend(**arguments), strict=True)) | changes
        return Reference(attend, made(**arguments), False, str(operator)).check(
            RunOutputs(list(results.values())), Tolerance()
        )

    torch.manual_seed(1234)
    assert check().right, check().reason
    states = [name for name in names if name in GENERATOR_OUTPUTS]
    # a graph keeps its state on the device, and a compiler as an integer of another type
    assert check(**dict.fromkeys(states, torch.tensor([7, 8], dtype=torch.int32))).right
    assert not check(**{names[1]: torch.full((2, 3, 40), 1.5)}).right
    assert not check(**{names[0]: attend(**arguments)[0] * 1.5}).right
    if not share:
        # a difference, although torch declares that the operator draws random numbers
        assert "permutation" not in str(check(**{names[1]: torch.full((2, 3, 40), 1.5)}).reason)


LOST_BITS = 13
PLACES = "cuda.matmul:{},cudnn.conv:{}"


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if read_precision("cuda.matmul") is None:
        pytest.skip("torch has one precision for all places")
    monkeypatch.setattr(tf32, "KINDS", ("cpu",))


def cut(tensor: Tensor) -> Tensor:
    """Return the part of float32 values that tensor cores read: without the last bits."""
    return (tensor.view(torch.int32) & -(1 << LOST_BITS)).view(torch.float32)


def rounded(tensor: Tensor) -> Tensor:
    return cut(tensor.view(torch.int32).add(1 << (LOST_BITS - 1)).view(torch.float32))


def of_tf32(function: Callable[..., Tensor], how: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda *args: function(*(how(arg.clone()) for arg in args))


def verdict(
    function: Callable[..., Tensor], met: Callable[..., Tensor], args: tuple[Tensor, ...], allowed: str
) -> ResultVerdict:
    op = str(function) if isinstance(function, torch._ops.OpOverload) else None
    with restored({"fp32_precision": PLACES.format(*allowed.split("/"))}):
        return Reference(function, lambda: (args, {}), False, op).check(observe(met, (args, {}), False), Tolerance())


def convolved(image: Tensor, kernel: Tensor) -> Tensor:
    return aten.convolution.default(image, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


PRODUCTS = {
    "a product": (aten.mm.default, (torch.randn(64, 256), torch.randn(256, 32)), "tf32/ieee"),
    "a batch of products": (aten.bmm.default, (torch.randn(4, 16, 512), torch.randn(4, 512, 8)), "tf32/ieee"),
    "a convolution": (convolved, (torch.randn(2, 16, 12, 12), torch.randn(8, 16, 3, 3)), "ieee/tf32"),
    "a layer": (lambda x, w: (x @ w).relu().softmax(-1), (torch.randn(64, 128), torch.randn(128, 10)), "tf32/ieee"),
}


@pytest.mark.parametrize("how", [cut, rounded])
@pytest.mark.parametrize("name", PRODUCTS)
def test_tf32_products_are_right_if_torch_allows_tf32(name: str, how: Callable[[Tensor], Tensor]) -> None:
    function, args, allowed = PRODUCTS[name]
    met = of_tf32(function, how)
    assert verdict(function, met, args, allowed).right
    # exact products are right too if eager used TF32
    assert verdict(met, function, args, allowed).right
    forbidden = "/".join(reversed(allowed.split("/")))
    assert not verdict(function, met, args, forbidden).right
    assert not verdict(function, met, args, "ieee/ieee").right


@pytest.mark.parametrize("name", PRODUCTS)
def test_wrong_results_remain_wrong_with_tf32(name: str) -> None:
    function, args, allowed = PRODUCTS[name]

    def one_off(*tensors: Tensor) -> Tensor:
        result = function(*tensors).clone()
        result.view(-1)[7] += 0.1 * result.abs().max()
        return result

    assert not verdict(function, one_off, args, allowed).right
    assert not verdict(function, lambda *tensors: function(*tensors) * 1.01, args, allowed).right


def test_operators_without_products_require_full_precision() -> None:
    args = (torch.randn(100), torch.randn(100))
    assert not verdict(aten.add.Tensor, of_tf32(torch.add, cut), args, "tf32/tf32").right


def test_cpu_has_no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf32, "KINDS", ("cuda",))
    function, args, _ = PRODUCTS["a product"]
    assert not verdict(function, of_tf32(function, rounded), args, "tf32/tf32").right
