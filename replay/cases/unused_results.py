"""Results that only a backward pass uses, arguments that require gradients, and operators that a device lacks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from opgrip.replay.cases.cases import Case
from opgrip.replay.operators.equivalents import equivalent_on
from opgrip.traces import Trace
from opgrip.traces.codec.call_blocks import Integers
from opgrip.traces.schema.arguments import TensorSpec, leaves, map_leaves, tensors
from opgrip.traces.schema.operator_arguments import interface_of, schema_of, written
from opgrip.traces.schema.records import NO_STORAGE, OPERATOR, Signature
from opgrip.traces.zoo.manifest import FIELD

# torch's messages for an argument that it does not differentiate, in several versions
_REFUSED = re.compile(
    r"not differentiable with respect to argument '(\w+)'|the derivative for '(\w+)' is not implemented"
)


def require_gradients(signature: Signature) -> Signature:
    args, kwargs = map_leaves(_requiring, (signature.args, signature.kwargs))
    return replace(signature, args=args, kwargs=kwargs)


def refused_argument(error: BaseException) -> str | None:
    match = _REFUSED.search(str(error))
    return None if match is None else match[1] or match[2]


def with_gradients(case: Case, lacks_gradient_flags: bool, refused: Collection[str]) -> Case:
    if not lacks_gradient_flags and not refused:
        return case

    def changed(signature: Signature) -> Signature:
        return _without(require_gradients(signature) if lacks_gradient_flags else signature, refused)

    return replace(case, signature=changed(case.signature), input_sets=[changed(item) for item in case.input_sets])


def with_equivalents(case: Case, device: str) -> tuple[Case, str]:
    if case.operator is not None:
        return case, ""
    first, *others = (equivalent_on(signature, device) for signature in (case.signature, *case.input_sets))
    if first is None:
        return case, ""
    input_sets = tuple(other.signature for other in others if other is not None and other.note == first.note)
    unused = frozenset(index for index in case.unused if index < first.result_count) | first.unused
    first_case = replace(case, signature=first.signature, input_sets=input_sets, unused=unused, weights=frozenset())
    return first_case, first.note


def _without(signature: Signature, refused: Collection[str]) -> Signature:
    schema = schema_of(signature) if refused else None
    if schema is None:
        return signature
    names = [argument.name for argument in schema.arguments]
    args = [
        map_leaves(_released, value) if name in refused else value
        for name, value in zip(names, signature.args, strict=False)
    ]
    kwargs = {
        name: map_leaves(_released, value) if name in refused else value for name, value in signature.kwargs.items()
    }
    return replace(signature, args=tuple(args), kwargs=kwargs)


def _requiring(leaf: Any) -> Any:
    if isinstance(leaf, TensorSpec) and (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
        return replace(leaf, requires_grad=True)
    return leaf


def _released(leaf: Any) -> Any:
    return replace(leaf, requires_grad=False) if isinstance(leaf, TensorSpec) else leaf


# indices of results that torch returns only for the operator's backward (statistics, seeds, indices), by operator;
# other results count as used, because a trace does not record which results the program itself reads
FOR_BACKWARD: Mapping[str, Sequence[int]] = {
    **dict.fromkeys(
        ["_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"]
        + ["_scaled_dot_product_fused_attention_overrideable"],
        range(1, 9),
    ),
    "_scaled_dot_product_flash_attention_for_cpu": (1,),
    "_scaled_dot_product_efficient_attention": (1, 2, 3),
    "_flash_attention_forward": (1, 2, 3, 4),
    "_efficient_attention_forward": (1, 2, 3, 4, 5),
    **dict.fromkeys(["native_layer_norm", "native_group_norm", "native_batch_norm"], (1, 2)),
    **dict.fromkeys(["_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "miopen_batch_norm"], (1, 2)),
    **dict.fromkeys(["cudnn_batch_norm", "_batch_norm_with_update", "_batch_norm_no_update"], (1, 2, 3)),
    "_fused_rms_norm": (1,),
    **dict.fromkeys(["nll_loss_forward", "nll_loss2d_forward", "log_sigmoid_forward", "_ctc_loss"], (1,)),
    **dict.fromkeys(["max_pool2d_with_indices", "max_pool3d_with_indices"], (1,)),
    **dict.fromkeys(["adaptive_max_pool2d", "adaptive_max_pool3d"], (1,)),
    **dict.fromkeys(["_embedding_bag", "_embedding_bag_forward_only"], (1, 2, 3)),
    "_thnn_fused_lstm_cell": (2,),
    "_thnn_fused_gru_cell": (1,),
    "mkldnn_rnn_layer": (3,),
    "_weight_norm_interface": (1,),
}


def with_unused_results(cases: Sequence[Case], trace: Trace) -> list[Case]:
    """Return the cases; `unused` of each contains the indices of results that the program probably does not use."""
    candidates = {
        case.trace_number: {*FOR_BACKWARD[packet]}
        for case in cases
        if case.operator is None and (packet := packet_of(case.signature)) in FOR_BACKWARD
    }
    if not candidates:
        return list(cases)
    end = trace.end
    is_whole = end is not None and not end.dropped and end.stopped is None and FIELD not in trace.header
    used = _used_results(trace, candidates) if is_whole else {}

    def marked(case: Case) -> Case:
        indices = candidates.get(case.trace_number)
        if indices is None or case.operator is not None:
            return case
        return replace(case, unused=frozenset(indices - used.get(case.trace_number, _used_in_training(case, indices))))

    return [marked(case) for case in cases]


def with_weights(cases: Sequence[Case], trace: Trace) -> list[Case]:
    changed = np.append(_changed_storages(trace), NO_STORAGE)
    numbers = {case.trace_number for case in cases if case.operator is None}
    counts = {item.number: len(interface_of(item).inputs) for item in trace.signatures if item.number in numbers}
    weights = {number: set(range(count)) for number, count in counts.items()}
    for calls, memory in trace.call_parts():
        for number, indices in calls.groupby("signature").indices.items():
            if number not in weights:
                continue
            own = calls.iloc[indices]
            count = counts[number] if (own["tensors"] >= counts[number]).all() else 0
            storages = memory[own["first_storage"].to_numpy(np.int64)[:, None] + np.arange(count)]
            weights[number] &= {*np.flatnonzero(~np.isin(storages, changed).any(axis=0)).tolist()}
    return [replace(case, weights=frozenset(weights.get(case.trace_number, ()))) for case in cases]


def _changed_storages(trace: Trace) -> Integers:
    # those that a call returns before a call takes them, and those that a call writes
    flags = {item.number: written(item) for item in trace.signatures}
    counts = {number: len(own) for number, own in flags.items()}
    seen = changed = np.empty(0, dtype=np.int64)
    for calls, memory in trace.call_parts():
        storages, first = np.unique(memory, return_index=True)
        arguments = _places_of_arguments(calls, counts)
        is_new_result = np.isin(first, arguments, invert=True) & np.isin(storages, seen, invert=True)
        own = zip(calls["signature"].tolist(), calls["tensors"].tolist(), strict=True)
        is_written = np.array([flag for number, count in own for flag in flags.get(number, ())[:count]], dtype=bool)
        seen = np.union1d(seen, storages)
        changed = np.union1d(changed, [*storages[is_new_result], *memory[arguments[is_written]]])
    return changed


def packet_of(signature: Signature) -> str:
    parts = signature.op.split(".")
    return parts[1] if signature.kind == OPERATOR and len(parts) == 3 and parts[0] == "aten" else ""


def _used_in_training(case: Case, indices: set[int]) -> set[int]:
    with_gradients = case.context.get("grad", True) and any(
        spec.requires_grad for spec in tensors([case.signature.args, case.signature.kwargs])
    )
    return indices if with_gradients else set()


def _used_results(trace: Trace, candidates: Mapping[int, set[int]]) -> dict[int, set[int]]:
    argument_counts = {item.number: len(interface_of(item).inputs) for item in trace.signatures}
    # storage, signature and index of each result, (N, 3)
    results = np.concatenate([np.empty((0, 3), dtype=np.int64), *_results(trace, candidates, argument_counts)])
    used_storages = np.empty(0, dtype=np.int64)
    for calls, memory in trace.call_parts():
        arguments = np.unique(memory[_places_of_arguments(calls, argument_counts)])
        used_storages = np.union1d(used_storages, arguments[np.isin(arguments, results[:, 0])])
    unknown = {*results[results[:, 0] == NO_STORAGE, 1].tolist()}
    used: dict[int, set[int]] = {number: set() for number in {*results[:, 1].tolist()} - unknown}
    for _, number, index in results[np.isin(results[:, 0], used_storages)].tolist():
        if number in used:
            used[number].add(index)
    return used


def _results(
    trace: Trace, candidates: Mapping[int, set[int]], argument_counts: Mapping[int, int]
) -> Iterator[Integers]:
    signatures = (item for item in trace.signatures if item.number in candidates)
    # by signature, the index of each candidate among all leaves by its index among the tensors
    indices: dict[int, dict[int, int]] = {}
    for item in signatures:
        tensor_places = [index for index, leaf in enumerate(leaves(item.outputs)) if isinstance(leaf, TensorSpec)]
        own_candidates = candidates[item.number]
        indices[item.number] = {tensor: index for tensor, index in enumerate(tensor_places) if index in own_candidates}
    for calls, memory in trace.call_parts():
        for number in candidates:
            own = calls[calls["signature"] == number]
            first, counts = own["first_storage"].to_numpy(np.int64), own["tensors"].to_numpy(np.int64)
            for tensor, index in indices[number].items():
                position = argument_counts[number] + tensor
                has_result = counts > position
                numbers = np.full(len(own), NO_STORAGE, dtype=np.int64)
                numbers[has_result] = memory[first[has_result] + position]
                yield np.column_stack([numbers, np.full_like(numbers, number), np.full_like(numbers, index)])


def _places_of_arguments(calls: pd.DataFrame, argument_counts: Mapping[int, int]) -> Integers:
    counts = calls["signature"].map(argument_counts).fillna(0).to_numpy(np.int64)
    counts = np.minimum(calls["tensors"].to_numpy(np.int64), counts)
    before = np.cumsum(counts) - counts
    within: Integers = np.arange(counts.sum()) - np.repeat(before, counts)
    return np.repeat(calls["first_storage"].to_numpy(np.int64), counts) + within
