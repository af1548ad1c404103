"""Default values for arguments without recorded values: values that the operator accepts and usually receives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch

from opgrip.traces.schema.arguments import FormatError, TensorSpec, map_leaves
from opgrip.traces.schema.operator_arguments import schema_arguments
from opgrip.traces.schema.records import ValueModel
from opgrip.traces.values import drawing as checks
from opgrip.traces.values.boxes import Boxes
from opgrip.traces.values.exact import Booleans
from opgrip.traces.values.floats import Floats
from opgrip.traces.values.integers import Integers
from opgrip.traces.values.model import value_models
from opgrip.traces.values.needs import kind_of, matches_any, refine_model
from opgrip.traces.values.progression import Offsets

LARGEST = 512  # maximum size of matrices that are tested for a Cholesky factor
LOOKED_AT = 4  # maximum number of matrices of a batch that are tested


@value_models.register("factorable")
@dataclass(frozen=True, slots=True)
class Factorable:
    """Value model of symmetric positive definite matrices (..., N, N), which have a Cholesky factor.

    diagonal : mean of the diagonal elements
    spread : root mean square of the other elements, relative to `diagonal`
    """

    diagonal: float
    spread: float

    priority: ClassVar[int] = 5
    on_request: ClassVar[bool] = True

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Factorable | None:
        matrices = _matrices(tensor)
        if matrices is None or matrices.shape[-1] > LARGEST:
            return None
        matrices = matrices.double()
        tolerance = 16 * torch.finfo(tensor.dtype).eps * float(matrices.abs().amax())
        if not float((matrices - matrices.mT).abs().amax()) <= tolerance:
            return None
        if bool(torch.linalg.cholesky_ex(matrices).info.any()):
            return None
        diagonal = matrices.diagonal(dim1=-2, dim2=-1)
        size, mean = matrices.shape[-1], diagonal.mean().item()
        rest = float(matrices.square().sum() - diagonal.square().sum()) / (matrices.numel() - diagonal.numel())
        return cls(mean, math.sqrt(max(0.0, rest)) / mean) if mean > 0 and size > 1 else None

    def check(self) -> None:
        checks.finite(self.diagonal, "a diagonal")
        checks.finite(self.spread, "a spread")
        if self.diagonal <= 0 or self.spread < 0:
            numbers = f"{self.diagonal} and {self.spread}"
            raise FormatError(f"matrices: expected a diagonal above 0 and a spread of at least 0, got {numbers}")

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        if len(shape) < 2 or shape[-1] != shape[-2]:
            return _general_matrices(self.diagonal, shape, dtype, generator)
        size = shape[-1]
        values = torch.randn(shape, dtype=torch.float64, generator=generator, device=generator.device)
        # the off-diagonal elements of such a product have a root mean square of 1 / sqrt(size) for a diagonal of 1
        part = min(0.95, self.spread * math.sqrt(size))
        values = values @ values.mT * (part / size)
        values.diagonal(dim1=-2, dim2=-1).add_(1 - part)
        return (values * self.diagonal).to(dtype).contiguous()


@value_models.register("triangular")
@dataclass(frozen=True, slots=True)
class Triangular:
    """Value model of triangular matrices (..., N, N) without zeros on the diagonal.

    upper : True if the zeros are below the diagonal
    low, high : range of the absolute values of diagonal elements
    spread : root mean square of the non-zero triangle, without the diagonal
    negative : share of negative elements on the diagonal, 0 to 1
    """

    upper: bool
    low: float
    high: float
    spread: float
    negative: float

    priority: ClassVar[int] = 6
    on_request: ClassVar[bool] = True

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> Triangular | None:
        matrices = _matrices(tensor)
        if matrices is None:
            return None
        upper = not bool(matrices.tril(-1).any())
        if not upper and bool(matrices.triu(1).any()):
            return None
        matrices = matrices.double()
        diagonal = matrices.diagonal(dim1=-2, dim2=-1)
        low, high = (float(bound) for bound in torch.aminmax(diagonal.abs()))
        if not 0 < low <= high < math.inf:
            return None
        rows = matrices.shape[-1]
        beside = (matrices.square().sum() - diagonal.square().sum()) / (matrices.numel() // rows * (rows - 1) / 2)
        negative = int(torch.count_nonzero(diagonal < 0)) / diagonal.numel()
        return cls(upper, low, high, math.sqrt(max(0.0, float(beside))), negative)

    def check(self) -> None:
        checks.flag(self.upper, "upper")
        for value in (self.low, self.high, self.spread):
            checks.finite(value, "an element of triangular matrices")
        checks.share(self.negative, "a share of negative elements")
        if not 0 < self.low <= self.high or self.spread < 0:
            numbers = f"{self.low}, {self.high} and {self.spread}"
            raise FormatError(f"matrices: expected 0 < low <= high and a spread of at least 0, got {numbers}")

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        if len(shape) < 2 or shape[-1] != shape[-2]:
            return _general_matrices(self.high, shape, dtype, generator)
        device = generator.device
        values = torch.randn(shape, dtype=torch.float64, generator=generator, device=device)
        # small enough that a solution grows by a constant factor and not with a power of the size
        values *= min(self.spread, self.low / math.sqrt(shape[-1]))
        values = values.triu(1) if self.upper else values.tril(-1)
        parts = torch.rand((2, *shape[:-1]), dtype=torch.float64, generator=generator, device=device)
        diagonal = parts[0] * self.high + (1 - parts[0]) * self.low
        values.diagonal(dim1=-2, dim2=-1).add_(torch.where(parts[1] < self.negative, -diagonal, diagonal))
        return values.to(dtype).contiguous()


def _matrices(tensor: torch.Tensor) -> torch.Tensor | None:
    shape = tensor.shape
    if tensor.dim() < 2 or shape[-1] != shape[-2] or shape[-1] < 2 or not tensor.dtype.is_floating_point:
        return None
    if tensor.itemsize == 1:
        return None
    batch = tensor.reshape(-1, *shape[-2:])
    return batch[:: max(1, -(-len(batch) // LOOKED_AT))]


def _general_matrices(
    scale: float, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    values = torch.randn(shape, dtype=torch.float64, generator=generator, device=generator.device)
    return (values * scale).to(dtype)


Call = Mapping[str, Any]  # arguments of a call, by their names in the operator's schema
Make = Callable[[TensorSpec, Call], ValueModel | None]
BOOL, WHOLE, FLOAT = "bool", "int", "float"
IMAGE = 800.0  # width in pixels of the image that contains generated boxes
SHARED = 0.05  # off-diagonal elements of a positive definite matrix, relative to the diagonal


@dataclass(frozen=True, slots=True)
class Default:
    """A row of the table of default values: which arguments it applies to, and the value model that they get.

    op, argument : shell patterns of names, separated by `|`
    """

    op: str
    argument: str
    of: str
    make: Make

    def is_about(self, op: str, argument: str, kind: str) -> bool:
        return self.of == kind and matches_any(argument, self.argument) and matches_any(op, self.op)


def default_values(
    op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any = None, first: int = -1
) -> tuple[tuple[Any, ...], dict[str, Any], dict[int, ValueModel]]:
    """Return a call's arguments with default value models for tensors without recorded values, and these models by
    number.

    first : number of the first model; the others get lower numbers
    """
    names = [name for name, _ in schema_arguments(op)]
    call = {**dict(zip(names, args, strict=False)), **kwargs}
    models: dict[int, ValueModel] = {}

    def filled(argument: str, tree: Any) -> Any:
        def fill(leaf: Any) -> Any:
            model = _model_of(op, argument, leaf, call, outputs) if isinstance(leaf, TensorSpec) else None
            if model is None:
                return leaf
            number = first - len(models)
            models[number] = model
            return replace(leaf, values=number)

        return map_leaves(fill, tree)

    if not names:
        return args, dict(kwargs), models
    by_place = (names[place] if place < len(names) else "" for place in range(len(args)))
    changed = tuple(filled(name, tree) for name, tree in zip(by_place, args, strict=True))
    return changed, {name: filled(name, tree) for name, tree in kwargs.items()}, models


def _model_of(op: str, argument: str, spec: TensorSpec, call: Call, outputs: Any) -> ValueModel | None:
    if spec.values is not None or spec.layout is not torch.strided or spec.parts or 0 in spec.shape:
        return None
    make = _make_of(op, argument, kind_of(spec.dtype))
    if make is None:
        return None
    try:
        model = make(spec, call)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError):
        # the call does not match its operator's schema
        return None
    return model if model is None or outputs is None else refine_model(op, argument, model, outputs)


@lru_cache(maxsize=4096)
def _make_of(op: str, argument: str, kind: str) -> Make | None:
    return next((row.make for row in DEFAULTS if row.is_about(op, argument, kind)), None)


def _between(low: float, high: float, whole: bool = False) -> Make:
    std = (high - low) / math.sqrt(12)
    model = Floats((low + high) / 2, std, low, high, 0.0, 0.0, 0.0, 0.0, shape="uniform", whole=whole)
    return lambda spec, call: model


def _numbers(spec: TensorSpec, low: int, high: int, are_distinct: bool = False) -> Integers | None:
    try:
        high = min(high, torch.iinfo(spec.dtype).max)
    except TypeError:
        return None
    count = math.prod(spec.shape)
    if high < low:
        return None
    distinct = min(count, high - low + 1) if are_distinct else None
    return Integers([], low, high, count, ascending=False, distinct=distinct)


def _below(size: Callable[[Call], int], are_distinct: bool = False) -> Make:
    return lambda spec, call: _numbers(spec, 0, int(size(call)) - 1, are_distinct)


def _rows(name: str, dimension: int = 0) -> Callable[[Call], int]:
    return lambda call: int(call[name].shape[dimension])


def _along(call: Call) -> int:
    return int(call["self"].shape[call["dim"]]) if call["self"].shape else 1


def _elements(call: Call) -> int:
    return math.prod(call["self"].shape)


def _classes(call: Call) -> int:
    shape = call["self"].shape
    return int(shape[1 if len(shape) > 1 else 0])


def _plane(dimensions: int) -> Callable[[Call], int]:
    return lambda call: math.prod(call["self"].shape[-dimensions:])


def _in_list(are_distinct: bool) -> Make:
    def make(spec: TensorSpec, call: Call) -> ValueModel | None:
        sizes = iter(call["self"].shape)
        for index in call["indices"]:
            is_mask = index is not None and kind_of(index.dtype) == BOOL
            covered = [next(sizes) for _ in range(len(index.shape) if is_mask else 1)]
            if index is spec:
                return _numbers(spec, 0, covered[0] - 1, are_distinct)
        return None

    return make


def _half(spec: TensorSpec, call: Call) -> ValueModel:
    total = math.prod(spec.shape)
    return Booleans(total // 2, total)


def _all(spec: TensorSpec, call: Call) -> ValueModel:
    total = math.prod(spec.shape)
    return Booleans(total, total)


def _as_values(spec: TensorSpec, call: Call) -> ValueModel:
    total = math.prod(spec.shape)
    shape = call["values"].shape
    rows = shape[0] if len(shape) > len(call["self"].shape) - len(spec.shape) and shape[0] != 1 else total // 2
    return Booleans(min(rows, total), total)


def _equal_lengths(spec: TensorSpec, call: Call) -> ValueModel | None:
    bags, indices = math.prod(spec.shape), math.prod(call["indices"].shape)
    each = indices // max(1, bags - bool(call.get("include_last_offset")))
    if bags < 2:
        return _numbers(spec, 0, 0)
    return Offsets(0, each * (bags - 1), bags - 1, 0 if each else bags - 1, [[each, bags - 1]])


def _repeats(spec: TensorSpec, call: Call) -> ValueModel | None:
    model = _numbers(spec, 1, 1)
    total = call.get("output_size")
    fits = type(total) is int and 0 <= total < 1 << 62
    return replace(model, low=0, high=total, total=total) if model is not None and fits else model


def _steps(spec: TensorSpec, call: Call) -> ValueModel | None:
    longest = int(call["input"].shape[1 if call["batch_first"] else 0])
    return _numbers(spec, longest, longest)


def _keys(spec: TensorSpec, call: Call) -> ValueModel | None:
    return _numbers(spec, 0, max(1, math.prod(spec.shape)))


def _boxes(spec: TensorSpec, call: Call) -> ValueModel | None:
    columns = spec.shape[-1] - 4
    if len(spec.shape) != 2 or columns not in (0, 1):
        return None
    images = call["input"].shape[0] - 1.0 if columns else 0.0
    low = [*[0.0] * columns, 0.0, 0.0, IMAGE / 50, IMAGE / 50]
    high = [*[images] * columns, IMAGE, IMAGE, IMAGE / 4, IMAGE / 4]
    return Boxes(columns, low, high, [*[True] * columns, *[False] * 4])


def _positive_definite(spec: TensorSpec, call: Call) -> ValueModel:
    return Factorable(1.0, SHARED / math.sqrt(max(1, spec.shape[-1])))


def _triangular(upper_by_default: bool) -> Make:
    return lambda spec, call: Triangular(bool(call.get("upper", upper_by_default)), 1.0, 2.0, 0.1, 0.0)


def _ranges() -> Iterator[Default]:
    chance, positive, around = _between(0.0, 1.0), _between(0.5, 1.5), _between(-1.0, 1.0)
    yield Default("aten.bernoulli*|aten.multinomial*", "self|p", FLOAT, chance)
    yield Default("aten.binary_cross_entropy*", "target", FLOAT, chance)
    yield Default("aten.binary_cross_entropy.*|aten.binary_cross_entropy_backward*", "self", FLOAT, chance)
    yield Default("aten.binomial*", "prob", FLOAT, chance)
    yield Default("aten.binomial*", "count", FLOAT, _between(1.0, 20.0, whole=True))
    yield Default("aten.poisson*", "self", FLOAT, _between(0.0, 10.0))
    yield Default("aten.*batch_norm*", "running_var|save_invstd|invstd|var|save_var", FLOAT, positive)
    yield Default("aten._fused_ad*", "exp_avg_sqs|max_exp_avg_sqs|state_sums", FLOAT, positive)
    yield Default("aten._fused_ad*", "state_steps", FLOAT, _between(1.0, 100.0, whole=True))
    roots = "|".join(f"aten.{name}*" for name in ("sqrt", "sqrt_", "rsqrt", "rsqrt_"))
    logs = "|".join(f"aten.{name}{end}.*" for name in ("log", "log2", "log10") for end in ("", "_"))
    yield Default(f"{roots}|{logs}|aten._foreach_sqrt*|aten._foreach_log*", "self", FLOAT, positive)
    yield Default("aten.acos.*|aten.asin.*|aten.atanh.*|aten.erfinv*", "self", FLOAT, around)
    yield Default("aten.*grid_sampler*", "grid", FLOAT, around)


def _structures() -> Iterator[Default]:
    yield Default("aten.cholesky.*|aten.linalg_cholesky*", "self", FLOAT, _positive_definite)
    yield Default("aten._linalg_eigh*", "A", FLOAT, _positive_definite)
    yield Default("aten.cholesky_inverse*", "self", FLOAT, _triangular(False))
    yield Default("aten.cholesky_solve*", "input2", FLOAT, _triangular(False))
    yield Default("aten.linalg_solve_triangular*", "self", FLOAT, _triangular(True))
    yield Default("aten.triangular_solve*", "A", FLOAT, _triangular(True))
    yield Default("torchvision.nms*", "dets", FLOAT, _boxes)
    yield Default("torchvision.*roi_*", "rois", FLOAT, _boxes)


def _indices() -> Iterator[Default]:
    yield Default("aten.embedding.*|aten._embedding_bag*.default", "indices", WHOLE, _below(_embeddings))
    yield Default("aten.embedding*_backward*|aten._embedding_bag*", "indices", WHOLE, _below(_embeddings))
    yield Default("aten.*embedding_bag*", "offsets", WHOLE, _equal_lengths)
    yield Default("aten.gather*|aten.index_select*|aten.take_along_dim*", "index|indices", WHOLE, _below(_along))
    yield Default("aten.take.*", "index", WHOLE, _below(_elements))
    yield Default("aten.index.Tensor*|aten._unsafe_index.*", "indices", WHOLE, _in_list(are_distinct=False))
    yield Default("aten.*index_put*", "indices", WHOLE, _in_list(are_distinct=True))
    written = "|".join(f"aten.{name}*" for name in ("index_add", "index_copy", "index_fill", "index_reduce", "scatter"))
    yield Default(written, "index", WHOLE, _below(_along, are_distinct=True))
    yield Default("aten.put*", "index", WHOLE, _below(_elements, are_distinct=True))
    for dimensions in (2, 3):
        pools = f"aten.*max_pool{dimensions}d*_backward*"
        yield Default(pools, "indices", WHOLE, _below(_plane(dimensions)))
        unpooled = _below(lambda call: math.prod(call["output_size"]), are_distinct=True)
        yield Default(f"aten.max_unpool{dimensions}d*", "indices", WHOLE, unpooled)
    sparse = _below(lambda call: min(call["size"][: call["sparse_dim"]]))
    yield Default("aten._sparse_coo_tensor_with_dims_and_tensors*", "indices", WHOLE, sparse)


def _numbers_and_masks() -> Iterator[Default]:
    yield Default("aten.*nll_loss*|aten.cross_entropy_loss*", "target", WHOLE, _below(_classes))
    yield Default("aten.one_hot*", "self", WHOLE, _below(lambda call: max(1, call.get("num_classes", 1))))
    yield Default("aten.*ctc_loss*", "targets", WHOLE, _below(_rows("log_probs", -1)))
    yield Default("aten.repeat_interleave.Tensor*|aten.repeat_interleave.self_Tensor", "repeats", WHOLE, _repeats)
    yield Default("aten._pack_padded_sequence.*", "lengths", WHOLE, _steps)
    divisions = "aten.div*|aten.true_divide*|aten.floor_divide*|aten.remainder*|aten.fmod*"
    yield Default(divisions, "other", WHOLE, lambda spec, call: _numbers(spec, 1, 9))
    sorts = "|".join(f"aten.{name}" for name in ("*sort*", "topk*", "kthvalue*", "*median*", "mode*", "*unique*"))
    yield Default(sorts, "self", WHOLE, _keys)
    yield Default("aten.isin*", "elements|test_elements", WHOLE, _keys)
    yield Default("aten._assert_async*|aten._functional_assert_async*|aten._is_all_true*", "self", BOOL, _all)
    yield Default("aten.*index_put*", "indices", BOOL, _as_values)
    yield Default("aten.*", "*", BOOL, _half)


def _embeddings(call: Call) -> int:
    return int(call["weight"].shape[0]) if "weight" in call else int(call["num_weights"])


# table of defaults; the first row that matches an argument applies
DEFAULTS = (*_ranges(), *_structures(), *_indices(), *_numbers_and_masks())
