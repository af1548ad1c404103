"""Table of the value models that operators need for their arguments, and of facts that recorded outputs reveal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch

from opgrip.traces.schema.arguments import tensors
from opgrip.traces.schema.records import ValueModel
from opgrip.traces.values.boxes import Boxes
from opgrip.traces.values.exact import Booleans
from opgrip.traces.values.floats import Floats
from opgrip.traces.values.integers import Integers
from opgrip.traces.values.model import fit

# function that adds facts from a call's outputs, as nested `TensorSpec`, to a model
Refine = Callable[[Any, Any], ValueModel]


@dataclass(frozen=True, slots=True)
class ValueNeed:
    """A row of the table: the value model that an argument of an operator needs.

    op : shell patterns of operator names, separated by `|`; after a leading `!`, the row applies to all other operators
    argument : shell patterns of argument names, separated by `|`
    model : name of the value model; empty if any model will do
    varies : True if other values drawn from the same model can change the operator's time or the sizes of its outputs
    """

    op: str
    argument: str
    model: str
    why: str
    varies: bool = True
    refine: Refine | None = None
    of: str = ""

    def is_about(self, op: str) -> bool:
        return matches_any(op, self.op.removeprefix("!")) is not self.op.startswith("!")

    @property
    def counts_all(self) -> bool:
        return self.why == _COUNT or self.model not in ("", "floats")


def fit_argument(op: str, argument: str, tensor: torch.Tensor) -> ValueModel | None:
    needs = _needs(op, argument, tensor.dtype)
    return fit(tensor, {need.model for need in needs}, any(need.counts_all for need in needs))


def refine_model(op: str, argument: str, model: ValueModel, outputs: Any) -> ValueModel:
    for need in _needs(op, argument, None):
        if need.refine is not None:
            model = need.refine(model, outputs)
    return model


@lru_cache(maxsize=4096)
def is_refined(op: str) -> bool:
    return any(need.refine is not None and need.is_about(op) for need in NEEDS)


def has_needs(op: str, argument: str, dtype: torch.dtype) -> bool:
    return bool(_needs(op, argument, dtype))


def depends_on_values(op: str, argument: str, dtype: torch.dtype) -> bool:
    return any(need.varies for need in _needs(op, argument, dtype))


def requested_kinds(op: str, argument: str, dtype: torch.dtype) -> frozenset[str]:
    return frozenset(need.model for need in _needs(op, argument, dtype) if need.model)


def reads_places(op: str, argument: str, dtype: torch.dtype) -> bool:
    return any(need.model in ("exact", "offsets") or need.why.endswith(_EXACT) for need in _needs(op, argument, dtype))


def sizes_outputs(op: str, argument: str, dtype: torch.dtype) -> bool:
    needs = _needs(op, argument, dtype)
    return any(need.refine is not None or "output's size" in need.why or need.why == _GROUPS for need in needs)


@lru_cache(maxsize=4096)
def _needs(op: str, argument: str, dtype: torch.dtype | None) -> tuple[ValueNeed, ...]:
    return tuple(
        need
        for need in NEEDS
        if need.is_about(op)
        and matches_any(argument, need.argument)
        and (dtype is None or not need.of or kind_of(dtype) in need.of.split("|"))
    )


def matches_any(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split("|"))


def kind_of(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point or dtype.is_complex else "int"


def _size(outputs: Any, which: int = 0, dimension: int = 0) -> int | None:
    specs = list(tensors(outputs))
    if which >= len(specs) or dimension >= len(specs[which].shape):
        return None
    return specs[which].shape[dimension]


def _with_true(model: Any, outputs: Any) -> Any:
    rows = _size(outputs)
    if type(model) is not Booleans or rows is None or rows > model.total:
        return model
    runs = None if model.runs is None else min(max(1, model.runs), rows, model.total - rows + 1)
    return replace(model, true=rows, runs=runs)


def _with_distinct(model: Any, outputs: Any) -> Any:
    rows = _size(outputs)
    return replace(model, distinct=rows) if isinstance(model, Integers | Floats) and rows else model


def _with_runs(model: Any, outputs: Any) -> Any:
    is_sorted = isinstance(model, Integers | Floats) and model.rises is not None and 0 in (model.rises, model.falls)
    return _with_distinct(model, outputs) if is_sorted else model


def _with_total(model: Any, outputs: Any) -> Any:
    rows = _size(outputs)
    return replace(model, total=rows) if isinstance(model, Integers) and rows is not None else model


def _with_groups(model: Any, outputs: Any) -> Any:
    rows = _size(outputs)
    return replace(model, groups=rows) if isinstance(model, Boxes) and rows else model


_COUNT = "the count of elements that are not zero is the output's size"
_GROUPS = "the more boxes do not overlap, the more are kept; each kept box costs a pass"
_CLASH = "equal or neighbouring indices determine how often writes collide, and what the cache contains"
_NEAR = "equal or neighbouring indices determine what the cache contains"
_ALIKE = "a sort treats equal and sorted elements as special cases"
_EXACT = "they are read as sizes and positions in memory"

_LENGTHS = "they ascend; the lengths between them determine the work and its balance"
_SUM = "their sum is the output's size"
_UNSORTED = "a search in unsorted values has no meaningful result"
_SPREAD = "the spread of the eigenvalues determines the number of iterations"
_IMAGE = "outside of the image, nothing is read; neighbouring values share the cache"
_CLASS = "an invalid class ends the process"
_ZERO = "a zero on the diagonal is a divisor: inf and nan"

NEEDS = (
    # outputs whose size depends on values
    ValueNeed("aten.nonzero.*|aten.nonzero_numpy.*|aten.argwhere*", "self", "", _COUNT, refine=_with_true),
    ValueNeed("aten.nonzero_static*", "self", "", "this number of positions is written, and the rest filled"),
    ValueNeed("aten.where.default", "condition", "", _COUNT, refine=_with_true),
    ValueNeed("aten._to_sparse*|aten.to_sparse*", "self", "", _COUNT),
    ValueNeed("aten.count_nonzero*", "self", "", "the share of zeros determines branches on a CPU", varies=False),
    ValueNeed("aten.masked_select*", "mask", "booleans", _COUNT),
    ValueNeed("aten.*index.Tensor*", "indices", "booleans", _COUNT, of="bool"),
    ValueNeed("aten.*index_put*", "indices", "booleans", "values of one row for each true element", of="bool"),
    ValueNeed("aten.masked_scatter*", "mask", "booleans", "as many elements of the source are read as are true"),
    ValueNeed("aten._unique*", "self", "", "the count of different values is the output's size", refine=_with_distinct),
    ValueNeed("aten.unique_consecutive*", "self", "", "the count of runs is the output's size", refine=_with_runs),
    ValueNeed("aten.unique_dim*", "self", "", "the count of different rows is the output's size"),
    ValueNeed("aten.repeat_interleave.Tensor*", "repeats", "integers", _SUM, refine=_with_total),
    ValueNeed("aten.repeat_interleave.self_Tensor", "repeats", "integers", _SUM),
    ValueNeed("aten.bincount*", "self", "integers", "the largest value is the output's size; " + _CLASH),
    ValueNeed("aten.one_hot*", "self", "integers", "the largest value is the output's size"),
    ValueNeed("aten._local_scalar_dense*", "self", "", "the program branches on the values", varies=False),
    # boxes
    ValueNeed("mmcv._ext:nms|mmcv._ext:softnms", "boxes|0", "boxes", _GROUPS, refine=_with_groups),
    ValueNeed("mmcv._ext:nms_*", "dets|0", "", _GROUPS),
    ValueNeed("torchvision.nms*", "dets", "boxes", _GROUPS, refine=_with_groups),
    ValueNeed("torchvision::nms", "dets|0", "boxes", _GROUPS, refine=_with_groups),
    ValueNeed("mmcv._ext:*nms*", "scores|1", "", "kept in their order", varies=False),
    ValueNeed("mmcv._ext:*roi_*", "rois|1", "boxes", "an image's index, and a size that determines the work"),
    ValueNeed("torchvision.*roi_*", "rois", "boxes", "an image's index, and a size that determines the work"),
    # indices
    ValueNeed("aten.embedding*|aten._embedding_bag*|aten.*index.Tensor*", "indices", "integers", _NEAR, of="int"),
    ValueNeed("aten.gather*|aten.index_select*", "index", "integers", _NEAR, of="int"),
    ValueNeed("aten.take*", "index|indices", "integers", _NEAR, of="int"),
    ValueNeed("aten.*index_put*|aten.max_unpool*|aten.*max_pool*_backward*", "indices", "integers", _CLASH, of="int"),
    ValueNeed("aten.*_embedding*_backward*|aten.embedding*_backward*", "indices", "integers", _CLASH, of="int"),
    ValueNeed("aten.index_add*|aten.index_copy*|aten.index_fill*", "index", "integers", _CLASH, of="int"),
    ValueNeed("aten.index_reduce*|aten.scatter*|aten.put*", "index", "integers", _CLASH, of="int"),
    ValueNeed("aten.histc*|aten.histogram*", "self", "floats", "elements in the same bin collide"),
    # pieces of different lengths
    ValueNeed("aten.*embedding_bag*|aten.*segment_reduce*", "offsets", "offsets", _LENGTHS),
    ValueNeed("aten.*segment_reduce*", "lengths", "integers", "they add up to the number of rows"),
    ValueNeed(
        "aten._nested_view_from_jagged*|aten._jagged_to_padded*|aten._padded_dense_to_jagged*",
        *("offsets", "offsets", _EXACT),
    ),
    ValueNeed("aten.*attention*", "cu_seqlens_*|cum_seq_*", "offsets", _LENGTHS),
    ValueNeed("aten.*sparse_cs*", "crow_indices|ccol_indices", "offsets", "they ascend, " + _EXACT),
    ValueNeed("aten.*sparse_compressed*", "compressed_indices", "offsets", "they ascend, " + _EXACT),
    ValueNeed("aten._convert_indices_from_csr_to_coo*", "crow_indices", "offsets", "they ascend, " + _EXACT),
    ValueNeed("aten._convert_indices_from_coo_to_csr*", "self", "offsets", "they ascend"),
    ValueNeed("aten._pack_padded_sequence*", "lengths", "integers", "they descend and add up to the output's size"),
    # order
    ValueNeed("aten.searchsorted*", "sorted_sequence", "floats", _UNSORTED),
    ValueNeed("aten.bucketize*", "boundaries", "floats", _UNSORTED),
    ValueNeed("aten.searchsorted*|aten.bucketize*", "self", "floats", "sorted keys access the cache in order"),
    ValueNeed("aten.sort*|aten.argsort*|aten.msort*|aten.topk*|aten.kthvalue*", "self", "", _ALIKE),
    ValueNeed("aten.*median*|aten.mode*", "self", "", _ALIKE),
    ValueNeed("aten.isin*", "elements|test_elements", "integers", "sorted and searched, or compared each with each"),
    # classes
    ValueNeed("aten.*nll_loss*", "target", "integers", f"{_CLASS}; ignored ones are passed over", False),
    ValueNeed("aten.cross_entropy_loss*|aten.multi*_margin_loss*", "target", "integers", _CLASS, False),
    ValueNeed("aten.*ctc_loss*", "targets", "integers", _CLASS, False),
    ValueNeed("aten.*ctc_loss*", "input_lengths|target_lengths", "integers", "lengths determine the work"),
    ValueNeed("mmcv._ext:*focal_loss*", "target|1", "integers", "an invalid class reads memory out of bounds", False),
    # probabilities
    ValueNeed("aten.multinomial*", "self", "probabilities", "rows below zero, or rows of zeros only, are rejected"),
    ValueNeed("aten.bernoulli*", "self|p", "floats", "probabilities outside of 0 to 1 are rejected", False),
    ValueNeed("aten.binomial*", "count|prob", "floats", "they determine the method of sampling"),
    ValueNeed("aten.poisson*", "self", "floats", "values below zero are rejected; others determine the method"),
    # positions in images
    ValueNeed("aten.*grid_sampler*", "grid", "floats", _IMAGE),
    ValueNeed("mmcv._ext:deform_conv_forward", "offset|2", "floats", _IMAGE),
    ValueNeed("mmcv._ext:modulated_deform_conv*", "offset|4", "floats", _IMAGE),
    ValueNeed("mmcv._ext:ms_deform_attn*", "sampling_loc|3", "floats", _IMAGE),
    ValueNeed("mmcv._ext:ms_deform_attn*", "*spatial_shapes|*level_start_index|1|2", "exact", _EXACT, of="int"),
    # matrices
    ValueNeed("aten.cholesky.*|aten.linalg_cholesky*", "self", "factorable", "others have no factor", False),
    ValueNeed("aten.cholesky_solve*", "input2", "triangular", _ZERO, False),
    ValueNeed("aten.cholesky_inverse*", "self", "triangular", _ZERO, False),
    ValueNeed("aten.linalg_solve_triangular*", "self", "triangular", "solutions overflow: inf and nan", False),
    ValueNeed("aten.triangular_solve*", "A", "triangular", "solutions overflow: inf and nan", False),
    ValueNeed("aten._linalg_eigh*", "A", "factorable", _SPREAD),
    ValueNeed("aten.linalg_inv_ex*|aten._linalg_solve_ex*", "A", "factorable", "singular matrices are rejected", False),
    ValueNeed("aten.linalg_inv_ex*|aten._linalg_solve_ex*", "A", "triangular", "singular matrices are rejected", False),
    ValueNeed("aten._linalg_svd*", "A", "", "the spread of the singular values determines the number of iterations"),
    ValueNeed("aten.linalg_eig*", "self", "", _SPREAD),
    ValueNeed("aten.linalg_lu_solve*", "pivots", "integers", "rows to swap, " + _EXACT, False),
    # the meaning of arguments of third-party functions is unknown; integers and booleans are usually indices
    ValueNeed("!aten.*", "*", "", "not known", of="int|bool"),
)
