"""Limits for index arguments that operators do not check; the indices come from a trace, which may be untrusted.

The operators were found by calling torch's operators with indices far out of bounds and observing which of them
accessed memory outside their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from opgrip.replay.operators.admission import Unsupported
from opgrip.replay.operators.memory import Arguments, Function

Call: TypeAlias = Mapping[str, Any]  # arguments of a call by name
Bound: TypeAlias = Callable[[Tensor, Call], Tensor]  # function that returns the nearest valid values of an index


def _below(size: Callable[[Call], int]) -> Bound:
    return lambda index, call: _clamp(index, size(call) - 1)


def _up_to(size: Callable[[Call], int]) -> Bound:
    return lambda index, call: _clamp(index, size(call))


def _clamp(index: Tensor, last: int) -> Tensor:
    if last < 0:
        # clamping to -1 would address memory before the first element
        raise IndexError("an index into a dimension of size 0")
    return index.clamp(0, last)


def _rows(name: str, dimension: int = 0) -> Callable[[Call], int]:
    return lambda call: int(call[name].shape[dimension])


def _plane(dimensions: int) -> Bound:
    """Return a function that clamps indices into the pooled tensor, whose last `dimensions` dimensions count as
    flattened.
    """
    return _below(lambda call: prod(call["self"].shape[-dimensions:]))


def _ascending_up_to(size: Callable[[Call], int]) -> Bound:
    return lambda index, call: index.clamp(0, size(call)).cummax(-1).values


def _lengths(lengths: Tensor, call: Call) -> Tensor:
    """Return segment lengths that are not negative and whose sum is at most the length of the segmented data."""
    ends = lengths.clamp(0, _segmented(call)).cumsum(-1).clamp(max=_segmented(call))
    return ends.diff(dim=-1, prepend=torch.zeros_like(ends[..., :1]))


def _segmented(call: Call) -> int:
    return int(call["data"].shape[call.get("axis", 0)])


def _shares(samples: Tensor, call: Call) -> Tensor:
    """Return random numbers clamped to 0 to 1; each places a pooling window within its range of possible positions."""
    return samples.nan_to_num().clamp(0, 1)


def _in_sizes(indices: Tensor, call: Call) -> Tensor:
    most = torch.tensor(call["size"][: indices.shape[0]], device=indices.device) - 1
    return torch.minimum(indices.clamp(min=0), most[:, None])


def _images(rois: Tensor, call: Call) -> Tensor:
    """Return regions of interest (`rois`), (N, 5), whose image index, in the first column, is clamped to the batch."""
    images = next(iter(call.values())).shape[0] if "batch_size" not in call else call["batch_size"]
    return torch.cat([rois[:, :1].nan_to_num().clamp(0, images - 1), rois[:, 1:]], 1)


def _bags(offsets: Tensor, call: Call) -> Tensor:
    """Return ascending start offsets of an embedding's bags, at most the number of indices."""
    count = int(call["indices"].numel())
    offsets = offsets.clamp(0, count).cummax(-1).values
    if "grad" in call:
        offsets[:1] = 0
        offsets[len(call["grad"]) :] = count
    return offsets


def _class_or_none(target: Tensor, call: Call) -> Tensor:
    """Return target classes clamped to valid ones; the class `ignore_index` does not change."""
    shape = call["self"].shape
    bounded = _clamp(target, shape[1 if len(shape) > 1 else 0] - 1)
    return torch.where(target == call["ignore_index"], target, bounded)


def _pairs(pivots: Tensor, call: Call) -> Tensor:
    """Return the pivots of an LDL factorization as valid row numbers, counted from 1.

    Negative numbers mark blocks of two rows; if a matrix has unpaired negative numbers, all its pivots become
    positive.
    """
    size = int(call["LD"].shape[-1])
    rows = []
    for row in pivots.reshape(-1, size).tolist():
        runs = [len(list(run)) for negative, run in groupby(row, lambda pivot: pivot < 0) if negative]
        signed = row if all(run % 2 == 0 for run in runs) else map(abs, row)
        rows.append([min(max(abs(pivot), 1), size) * (-1 if pivot < 0 else 1) for pivot in signed])
    return torch.tensor(rows, dtype=pivots.dtype, device=pivots.device).reshape(pivots.shape)


_PACKED = {
    "offsets": _bags,
    "compressed_indices_mapping": lambda rows, call: rows.clamp(-1, call["weight"].shape[0] - 1),
}
_CLASSES = _below(_rows("log_probs", -1))
_BAG = {
    "indices": _below(lambda call: int(call["num_weights"])),
    "offset2bag": _below(_rows("grad")),
    "offsets": _bags,
    "maximum_indices": _below(lambda call: int(call["num_weights"])),
}
_CTC = {
    "targets": _CLASSES,
    "input_lengths": _up_to(_rows("log_probs")),
    "target_lengths": _up_to(lambda call: _longest_target(call)),
}
_SEGMENTS = {"lengths": _lengths, "offsets": _ascending_up_to(_segmented)}


def _longest_target(call: Call) -> int:
    """Return the largest valid target length for a CTC loss: the length of a row of targets or, if all targets are in
    one row, an equal part of it for each batch element.

    In a backward call, the number of states that the forward call saved limits the length too.
    """
    targets, states = call["targets"], call.get("log_alpha")
    longest = int(targets.shape[-1]) // (1 if targets.dim() > 1 else max(1, len(call["target_lengths"])))
    return longest if states is None else min(longest, int(states.shape[-1]) // 2)


# functions that limit index arguments which operators do not check, by operator and argument
UNCHECKED: Mapping[str, Mapping[str, Bound]] = {
    "aten::max_pool2d_with_indices_backward": {"indices": _plane(2)},
    "aten::max_pool3d_with_indices_backward": {"indices": _plane(3)},
    "aten::adaptive_max_pool2d_backward": {"indices": _plane(2)},
    "aten::adaptive_max_pool3d_backward": {"indices": _plane(3)},
    "aten::_ctc_loss": _CTC,
    "aten::_ctc_loss_backward": _CTC,
    "aten::_embedding_bag_backward": _BAG,
    "aten::_embedding_bag_dense_backward": _BAG,
    "aten::_embedding_bag_sparse_backward": _BAG,
    "aten::_embedding_bag_per_sample_weights_backward": {
        "indices": _below(_rows("weight")),
        "offset2bag": _below(_rows("grad")),
        "offsets": _bags,
    },
    "aten::embedding_dense_backward": {"indices": _below(lambda call: int(call["num_weights"]))},
    "aten::embedding_backward": {"indices": _below(lambda call: int(call["num_weights"]))},
    "aten::embedding_sparse_backward": {"indices": _below(lambda call: int(call["num_weights"]))},
    "aten::_gather_sparse_backward": {"index": _below(lambda call: int(call["self"].shape[call["dim"]]))},
    "aten::nll_loss_backward": {"target": _class_or_none},
    "aten::nll_loss2d_backward": {"target": _class_or_none},
    **{f"quantized::embedding_bag_{bits}_rowwise_offsets": _PACKED for bits in ("byte", "4bit", "2bit")},
    "aten::linalg_ldl_solve": {"pivots": _pairs},
    # torch checks for infinite values only in linalg_eig
    "aten::linalg_eigvals": {"self": lambda matrix, call: matrix.nan_to_num()},
    "aten::_linalg_eigvals": {"self": lambda matrix, call: matrix.nan_to_num()},
    "aten::fractional_max_pool2d": {"random_samples": _shares},
    "aten::fractional_max_pool3d": {"random_samples": _shares},
    "aten::segment_reduce": _SEGMENTS,
    "aten::_segment_reduce_backward": _SEGMENTS,
    "aten::_sparse_mm_reduce_impl_backward": {"arg_out": _below(lambda call: int(call["self"]._nnz()))},
    "aten::_convert_indices_from_csr_to_coo": {
        "crow_indices": _ascending_up_to(lambda call: int(call["col_indices"].shape[-1]))
    },
    "aten::_convert_indices_from_coo_to_csr": {"self": _below(lambda call: int(call["size"]))},
    "aten::_sparse_coo_tensor_with_dims_and_tensors": {"indices": _in_sizes},
    "torchvision::roi_align": {"rois": _images},
    "torchvision::_roi_align_backward": {"rois": _images},
    "torchvision::roi_pool": {"rois": _images},
    "torchvision::_roi_pool_backward": {"rois": _images},
    "torchvision::ps_roi_align": {"rois": _images},
    "torchvision::_ps_roi_align_backward": {"rois": _images},
    "torchvision::ps_roi_pool": {"rois": _images},
    "torchvision::_ps_roi_pool_backward": {"rois": _images},
}


NO_BOUNDS = "its indices cannot be clamped to valid values"


@dataclass(frozen=True, slots=True)
class _Rules:
    """The functions that clamp one operator's index arguments, and the names of all its arguments in order."""

    names: tuple[str, ...]
    bounds: Mapping[str, Bound]

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (argument name, its values, clamped values) for each index argument of a call."""
        call = {**dict(zip(self.names, args, strict=False)), **kwargs}
        for name, bound in self.bounds.items():
            index = call.get(name)
            if isinstance(index, Tensor) and index.numel():
                yield name, index, bound(index, call).to(index.dtype)

    def replace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], others: dict[str, Tensor]) -> Arguments:
        args = tuple(others.pop(name, arg) for name, arg in zip(self.names, args, strict=False))
        return args, {**kwargs, **others}


def _rules_of(function: Any) -> _Rules | None:
    schema = getattr(function, "_schema", None)
    if schema is None:
        return None
    bounds = UNCHECKED.get(schema.name)
    return None if bounds is None else _Rules(tuple(argument.name for argument in schema.arguments), bounds)


@contextmanager
def _refusing(reason: str) -> Iterator[None]:
    """Convert the errors that an invalid call causes in the block to `Unsupported` with this reason."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise Unsupported(f"{reason} ({error})") from error


def bound_indices(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Clamp out-of-bounds indices of a call in place, so that it accesses no memory outside its tensors.

    Raises `Unsupported` if the call indexes an empty tensor or is not valid.
    """
    rules = _rules_of(function)
    if rules is None:
        return
    with _refusing(NO_BOUNDS):
        for _, index, bounded in rules.of(args, kwargs):
            if not torch.equal(index, bounded):
                _write(index.detach(), bounded)


def bounded_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return the arguments of a call in which clamped copies replace out-of-bounds indices.

    Raises `Unsupported` if the call indexes an empty tensor or is not valid.
    """
    rules = _rules_of(function)
    if rules is None:
        return args, kwargs
    with _refusing(NO_BOUNDS):
        others = {
            name: bounded
            for name, index, bounded in rules.of(args, kwargs)
            # a comparison would wait for an accelerator
            if index.device.type != "cpu" or not torch.equal(index, bounded)
        }
    return rules.replace(args, kwargs, others)


def check_indices(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise `Unsupported` if a call that a composite operator makes has indices that are out of bounds."""
    rules = _rules_of(function)
    with _refusing("a call that it makes has indices that cannot be checked"):
        if rules is not None and any(not torch.equal(index, bounded) for _, index, bounded in rules.of(args, kwargs)):
            raise Unsupported("a call that it makes has indices out of bounds")


def bounding(function: Function) -> Function:
    """Return a function that clamps the index arguments at each call; an operator that checks its indices is returned
    unchanged.

    This is needed inside subgraphs, where other calls compute the indices.
    """
    rules = _rules_of(function)
    if rules is None:
        return function

    def bounded_call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = rules.replace(args, kwargs, {name: bounded for name, _, bounded in rules.of(args, kwargs)})
        return function(*args, **kwargs)

    bounded_call.bounds = function  # type: ignore[attr-defined]
    return bounded_call


def bounded_function(function: Function) -> Function:
    """Return the operator that `bounding` has wrapped, or the function itself if it is not wrapped."""
    return getattr(function, "bounds", function)


def _write(tensor: Tensor, values: Tensor) -> None:
    try:
        tensor.copy_(values)
    except RuntimeError:
        # its elements share memory; index 0 is in bounds of every tensor that is not empty
        torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).zero_()
