"""Limits for index arguments that operators do not check; the indices come from a trace, which may be untrusted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from opgrip.replay.operators.admission import Unsupported
from opgrip.replay.operators.agreement.sizes import Call, expanded, named
from opgrip.replay.operators.memory import Arguments, Function, tensors_in

Bound: TypeAlias = Callable[[Tensor, Call], Tensor]  # function that returns the nearest valid values of an index


def _below(size: Callable[[Call], int]) -> Bound:
    return lambda index, call: _clamp(index, int(size(call)) - 1)


def _clamp(index: Tensor, last: int) -> Tensor:
    if last < 0:
        # clamping to -1 would address memory before the first element
        raise IndexError("an index into a dimension of size 0")
    return index.clamp(0, last)


def _ascending_up_to(size: Callable[[Call], int]) -> Bound:
    return lambda index, call: index.clamp(0, size(call)).cummax(-1).values


def _segmented(call: Call) -> int:
    return int(call["data"].shape[call.get("axis", 0)])


def fitting_lengths(lengths: Tensor, most: int, total: int | Tensor) -> Tensor:
    """Return lengths that add up to `total`: `lengths`, lengthened or shortened in proportion.

    lengths : (..., count) integers, which may be random numbers
    most : limit of each length
    total : an integer, or (..., 1) integers
    """
    lengths = lengths.clamp(0, most)
    if lengths.numel() == 0:
        return lengths
    have = lengths.sum(-1, keepdim=True)
    room = most - lengths
    # shorten all rows in proportion, or all free space in proportion
    shorter = _shrunk(lengths, have, total)
    longer = most - _shrunk(room, room.sum(-1, keepdim=True), lengths.shape[-1] * most - total)
    lengths = torch.where(have > total, shorter, torch.where(have < total, longer, lengths))
    # correct the rounding
    missing = total - lengths.sum(-1, keepdim=True)
    lengths = lengths + _spread(missing.clamp(min=0), most - lengths)
    return lengths - _spread((-missing).clamp(min=0), lengths)


def _shrunk(lengths: Tensor, have: Tensor, total: int | Tensor) -> Tensor:
    ends = (lengths.cumsum(-1).double() * (total / have.clamp(min=1).double())).floor().long()
    return ends.diff(dim=-1, prepend=torch.zeros_like(have)).clamp(min=0).minimum(lengths)


def _spread(amount: Tensor, most: Tensor) -> Tensor:
    before = most.cumsum(-1) - most
    return (amount - before).clamp(min=0).minimum(most)


def _segment_lengths(lengths: Tensor, call: Call) -> Tensor:
    count = _segmented(call)
    if "grad" in call or call.get("unsafe"):
        return fitting_lengths(lengths, count, lengths.clamp(0, count).sum(-1, keepdim=True).clamp(max=count))
    return fitting_lengths(lengths, count, count)


def _in_sizes(indices: Tensor, call: Call) -> Tensor:
    # without sizes, the largest indices decide them
    sizes = call.get("size", indices.amax(-1) + 1)[: indices.shape[0]]
    return torch.stack([_clamp(row, size - 1) for row, size in zip(indices, sizes, strict=True)])


def _images(rois: Tensor, call: Call) -> Tensor:
    images = call["batch_size"] if "batch_size" in call else call.get("grad_input", call.get("input")).shape[0]
    # a coordinate that is not a number, or overflows, becomes any index, and the size of a table is a product of two
    most = min(1e4 / max(abs(call["spatial_scale"]), 1e-5), torch.finfo(rois.dtype).max)
    return torch.cat([_clamp(rois[:, :1].nan_to_num(), images - 1), rois[:, 1:].nan_to_num().clamp(-most, most)], 1)


def _bags(offsets: Tensor, call: Call) -> Tensor:
    count = int(call["indices"].numel())
    offsets = offsets.clamp(0, count).cummax(-1).values
    if "grad" in call:
        offsets[:1] = 0
        offsets[len(call["grad"]) :] = count
    return offsets


def _class_or_ignored(target: Tensor, call: Call) -> Tensor:
    shape = call["self"].shape
    bounded = _clamp(target, shape[1 if len(shape) > 1 else 0] - 1)
    return torch.where(target == call["ignore_index"], target, bounded)


def _pairs(pivots: Tensor, call: Call) -> Tensor:
    size = int(call["LD"].shape[-1])
    rows = []
    for row in pivots.reshape(-1, size).tolist():
        runs = [len(list(run)) for negative, run in groupby(row, lambda pivot: pivot < 0) if negative]
        signed = row if all(run % 2 == 0 for run in runs) else map(abs, row)
        rows.append([min(max(abs(pivot), 1), size) * (-1 if pivot < 0 else 1) for pivot in signed])
    return torch.tensor(rows, dtype=pivots.dtype, device=pivots.device).reshape(pivots.shape)


def _target_lengths(lengths: Tensor, call: Call) -> Tensor:
    targets, states = call["targets"], call.get("log_alpha")
    longest = count = int(targets.shape[-1])
    if states is not None:
        longest = min(longest, int(states.shape[-1]) // 2)
    # the targets of all samples may be in one row, one sample after another
    return _clamp(lengths, longest) if targets.dim() > 1 else fitting_lengths(lengths, longest, count)


def _row_or_none(rows: Tensor, call: Call) -> Tensor:
    # -1 is the maximum of an empty bag and a row that was pruned
    return rows.clamp(-1, (call["weight"].shape[0] if "weight" in call else call["num_weights"]) - 1)


_WEIGHTS = _below(lambda call: call["num_weights"])
_BAG = {"offset2bag": _below(lambda call: call["grad"].shape[0]), "offsets": _bags}
# functions that limit index arguments, by operators (see `expanded`) and argument
_BOUNDS: Mapping[str, Mapping[str, Bound]] = {
    "{max_pool2d_with_indices,adaptive_max_pool2d}_backward": {
        "indices": _below(lambda call: prod(call["self"].shape[-2:]))
    },
    "{max_pool3d_with_indices,adaptive_max_pool3d}_backward": {
        "indices": _below(lambda call: prod(call["self"].shape[-3:]))
    },
    "ctc_loss _ctc_loss{,_backward}": {
        "targets": _below(lambda call: call["log_probs"].shape[-1]),
        "input_lengths": lambda lengths, call: _clamp(lengths, call["log_probs"].shape[0]),
        "target_lengths": _target_lengths,
    },
    "_embedding_bag{,_dense,_sparse}_backward": {"indices": _WEIGHTS, "maximum_indices": _row_or_none, **_BAG},
    "_embedding_bag_per_sample_weights_backward": {"indices": _below(lambda call: call["weight"].shape[0]), **_BAG},
    "embedding{,_dense,_sparse}_backward": {"indices": _WEIGHTS},
    "quantized::embedding_bag_{byte,4bit,2bit}_rowwise_offsets": {
        "offsets": _bags,
        "compressed_indices_mapping": _row_or_none,
    },
    "_gather_sparse_backward": {"index": _below(lambda call: call["self"].shape[call["dim"]])},
    "nll_loss{,2d}_backward": {"target": _class_or_ignored},
    "linalg_ldl_solve": {"pivots": _pairs},
    # torch checks for infinite values only in linalg_eig
    "{,_}linalg_eigvals": {"self": lambda matrix, call: matrix.nan_to_num()},
    # each places a pooling window within its range of possible positions
    "fractional_max_pool{2,3}d": {"random_samples": lambda samples, call: samples.nan_to_num().clamp(0, 1)},
    "segment_reduce _segment_reduce_backward": {"lengths": _segment_lengths, "offsets": _ascending_up_to(_segmented)},
    # the number of elements stands for a row without elements
    "_sparse_mm_reduce_impl_backward": {"arg_out": _below(lambda call: call["self"]._nnz() + 1)},
    "_convert_indices_from_csr_to_coo": {
        "crow_indices": _ascending_up_to(lambda call: int(call["col_indices"].shape[-1]))
    },
    "_convert_indices_from_coo_to_csr": {"self": _below(lambda call: call["size"])},
    "sparse_coo_tensor _sparse_coo_tensor_with_dims_and_tensors": {"indices": _in_sizes},
    "torchvision::{,_}{roi_align,ps_roi_align,ps_roi_pool,roi_pool} mmcv::roi_align_{forward,backward}": {
        "rois": _images
    },
    "torchvision::_{roi_align,roi_pool,ps_roi_align,ps_roi_pool}_backward": {
        "rois": _images,
        "argmax": lambda places, call: places.clamp(-1, call["height"] * call["width"] - 1),
        "channel_mapping": _below(lambda call: call["channels"]),
    },
}
BOUNDS = {operator: bounds for names, bounds in _BOUNDS.items() for operator in expanded(names)}


@dataclass(frozen=True, slots=True)
class _Rules:
    names: tuple[str, ...]  # arguments of the operator in order
    bounds: Mapping[str, Bound]
    written: Collection[str]  # arguments that it may write

    def bounded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor, Tensor]]:
        call = {**dict(zip(self.names, args, strict=False)), **kwargs}
        for name, bound in self.bounds.items():
            index = call.get(name)
            if isinstance(index, Tensor) and index.numel():
                memory = index.untyped_storage()._cdata
                outputs = tensors_in([call.get(written) for written in self.written if written != name])
                if any(output.untyped_storage()._cdata == memory for output in outputs):
                    raise ValueError(f"it may write into {name}")
                yield name, index, bound(index, call).to(index.dtype)

    def replace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], others: dict[str, Tensor]) -> Arguments:
        args = tuple(others.pop(name, arg) for name, arg in zip(self.names, args, strict=False))
        return args, {**kwargs, **others}


def _rules_of(function: Any) -> _Rules | None:
    operator, names = named(function)
    if operator not in BOUNDS:
        return None
    arguments = function._schema.arguments if hasattr(function, "_schema") else ()
    written = [argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write]
    return _Rules(names, BOUNDS[operator], written if arguments else names)


def _valid_indices(rules: _Rules, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor, Tensor]]:
    try:
        return list(rules.bounded(args, kwargs))
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise Unsupported(f"its indices cannot be clamped to valid values ({error})") from error


def bound_indices(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Clamp, in place, those indices of a call that the operator does not check itself."""
    rules = _rules_of(function)
    for _, index, valid in [] if rules is None else _valid_indices(rules, args, kwargs):
        if not torch.equal(index, valid):
            _write(index.detach(), valid)


def bounded_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return a call's arguments with clamped copies of those index tensors that the operator does not check itself."""
    rules = _rules_of(function)
    if rules is None:
        return args, kwargs
    others = {
        name: valid
        for name, index, valid in _valid_indices(rules, args, kwargs)
        # a comparison would wait for an accelerator
        if index.device.type != "cpu" or not torch.equal(index, valid)
    }
    return rules.replace(args, kwargs, others)


def check_indices(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise `Unsupported` if a call that a composite operator makes has indices that are out of bounds."""
    rules = _rules_of(function)
    indices = [] if rules is None else _valid_indices(rules, args, kwargs)
    if not all(torch.equal(index, valid) for _, index, valid in indices):
        raise Unsupported("a call that it makes has indices out of bounds")


def bounding(function: Function) -> Function:
    """Return a function that clamps, at each call, the indices that `function` does not check itself."""
    rules = _rules_of(function)
    if rules is None:
        return function

    def bounded_call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = rules.replace(args, kwargs, {name: bounded for name, _, bounded in rules.bounded(args, kwargs)})
        return function(*args, **kwargs)

    return bounded_call


def _write(tensor: Tensor, values: Tensor) -> None:
    try:
        tensor.copy_(values)
    except RuntimeError:
        # its elements share memory; index 0 is in bounds of every tensor that is not empty
        torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).zero_()
