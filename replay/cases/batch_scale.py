"""Replay of calls with a batch that is larger than the recorded one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias

import torch

from opgrip.errors import one_line
from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.flow import FlowingCall, make_flow
from opgrip.replay.inputs.inputs import as_recorded
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.traces import Trace
from opgrip.traces.schema.arguments import GeneratorSpec, Opaque, TensorSpec, leaves, map_leaves, tensors
from opgrip.traces.schema.records import NO_STORAGE, OPERATOR, Signature

# operators whose data have the batch in the first dimension, with the index of the data argument
IMAGES = {
    "aten.convolution.default": 0,
    "aten.native_batch_norm.default": 0,
    "aten.cudnn_batch_norm.default": 0,
    "aten.miopen_batch_norm.default": 0,
    "aten._native_batch_norm_legit.default": 0,
    "aten._batch_norm_with_update.default": 0,
}
# operators whose data may have a batch dimension or, like positions, be the same for the whole batch
WORDS = {"aten.embedding.default": 1}
# operators whose data have the batch in the first dimension, possibly multiplied by other sizes
ROWS = {
    "aten.addmm.default": 1,
    "aten.mm.default": 0,
    "aten.linear.default": 0,
    "aten.bmm.default": 0,
    "aten.native_layer_norm.default": 0,
}
ANCHORS = {**IMAGES, **WORDS, **ROWS}

_PARAMETERS = frozenset({"weight", "bias", "running_mean", "running_var"})
_RESHAPING = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten._reshape_alias.default")
_JOINING = ("aten.cat.default", "aten.stack.default")
_CUTTING = ("aten.select.int", "aten.slice.Tensor", "aten.unbind.int", "aten.split.Tensor")
# arguments that are sizes of tensors; `output_size` is not, because it is a size of images
_SIZE_ARGUMENTS = frozenset(("size", "sizes", "shape", "input_size", "input_sizes", "sym_size", "N"))
# factor for trial runs: a prime by which programs rarely multiply sizes
_FACTOR = 7
# most tensors of a call that are assumed to have the batch, each with and without
_MOST_ASSUMED = 4

PLAIN, GROWS, ITEM = "plain", "grows", "item"
# whether the batch is a tensor's first dimension, or the tensor belongs to one element of the batch; another text is
# the reason why that is unknown
Growth: TypeAlias = str


@dataclass(frozen=True, slots=True)
class ScaledCall:
    inputs: tuple[Growth, ...]
    outputs: tuple[Growth, ...] = ()
    sizes: bool = False
    lost: str | None = None


def find_parameters(
    calls: list[tuple[FlowingCall, str]], signatures: Mapping[int, Signature]
) -> tuple[set[int], set[int]]:
    """Return all storages that exist before the first call, and those of them that hold parameters.

    calls : (call, phase) in program order
    """
    result_memory: set[int] = set()
    outside: set[int] = set()
    trained: set[int] = set()
    learning: set[int] = set()
    data: set[int] = set()
    named = {number: list(named_tensors(signature)) for number, signature in signatures.items()}
    for call, phase in calls:
        outside.update(number for number in call.inputs if number not in result_memory and number != NO_STORAGE)
        result_memory.update(number for number in call.outputs if number not in outside)
        if phase == "optimizer":
            trained.update(call.inputs)
            continue
        if phase == "forward" and call.op in ANCHORS:
            data.add(call.inputs[ANCHORS[call.op]])
        for number, (spec, name) in zip(call.inputs, named.get(call.signature, ()), strict=False):
            if name in _PARAMETERS or (name == "mat2" and phase == "forward"):
                trained.add(number)
            elif spec.requires_grad:
                learning.add(number)
    # a network's data may require gradients too
    return outside, (trained | learning - data) & outside


def named_tensors(signature: Signature) -> Iterator[tuple[TensorSpec, str]]:
    for name, value in _named_arguments(signature):
        for spec in tensors(value):
            yield spec, name


def _named_arguments(signature: Signature) -> list[tuple[str, Any]]:
    function = _operator_of(signature)
    names = [] if function is None else [argument.name for argument in function._schema.arguments]
    names += [""] * (len(signature.args) - len(names))
    return [*zip(names, signature.args, strict=False), *signature.kwargs.items()]


def _operator_of(signature: Signature) -> Any:
    if signature.kind != OPERATOR:
        return None
    try:
        function = find_operator(signature).function
    except Unsupported:
        return None
    return function if isinstance(function, torch._ops.OpOverload) else None


class BatchScale:
    """Finds out which tensors of a trace have the batch in their first dimension."""

    def __init__(self, trace: Trace) -> None:
        flow = make_flow(trace)
        phases = map(str, trace.own_calls["phase"].tolist())
        self._calls = list(zip(flow.calls, phases, strict=True))
        self._signatures, self._interfaces = flow.signatures, flow.interfaces
        self._outside, self._parameters = find_parameters(self._calls, flow.signatures)
        self._growths: dict[Any, Growth] = {}  # by storage, shape, strides and offset
        self._storage_growths: dict[int, Growth] = {}  # of the first tensor in each storage
        self._makers: dict[Any, int] = {}  # by storage, shape, strides and offset, the signature that returned it
        self._scaled_calls: dict[Any, ScaledCall] = {}
        self._counts: dict[int, Counter[ScaledCall]] = {}
        self._anchored: set[int] = set()  # signatures of calls in which the batch was found
        self.batch = self._find_batch()
        if self.batch:
            for call, phase in self._calls:
                self._follow(call, phase)

    def verdict(self, number: int) -> ScaledCall:
        if not self.batch:
            raise Unsupported(
                "the batch size of the trace is unknown: it contains no convolution, embedding or matrix product"
            )
        if number not in self._counts:
            raise Unsupported("the trace has no call of this signature")
        counts = self._counts[number]
        verdict = max(counts, key=lambda scaled: (scaled.lost is None, counts[scaled]))
        if verdict.lost is not None:
            raise Unsupported(verdict.lost)
        return verdict

    def _find_batch(self) -> int:
        entered: list[tuple[int, ...]] = []
        for call, phase in self._calls:
            specs = self._interfaces[call.signature].inputs
            for number, spec in zip(call.inputs, specs, strict=True):
                if number in self._outside and number not in self._parameters and len(spec.shape) > 1:
                    entered.append(spec.shape)
            place = ANCHORS.get(call.op)
            if place is None or phase != "forward" or call.inputs[place] in self._parameters or not specs[place].shape:
                continue
            size = specs[place].shape[0]
            if call.op in ROWS:
                # rows may be a product of sizes, which are separate in tensors that entered earlier
                return next((shape[0] for shape in entered if shape[0] and size % shape[0] == 0), size)
            return size
        return 0

    def _follow(self, call: FlowingCall, phase: str) -> None:
        signature = self._signatures.get(call.signature)
        if signature is None or signature.raised is not None:
            return
        interface = self._interfaces[call.signature]
        keys = [
            (number, spec.shape, spec.stride, spec.offset)
            for number, spec in zip(call.inputs, interface.inputs, strict=True)
        ]
        # gradients of parameters do not have the batch
        growths = [PLAIN if phase == "optimizer" else self._growth_of(key) for key in keys]
        anchor = ANCHORS.get(signature.op)
        begun = GROWS in self._storage_growths.values()
        if anchor is not None and phase == "forward" and growths[anchor] == PLAIN and self._may_grow(keys[anchor]):
            shape = interface.inputs[anchor].shape
            fits = bool(shape) and (shape[0] == self.batch or (signature.op in ROWS and shape[0] % self.batch == 0))
            # each step may begin with data of its own
            if fits and (signature.op in IMAGES or not begun or call.signature in self._anchored):
                growths[anchor] = GROWS
                self._anchored.add(call.signature)
        # the other tensors of a call that may have the batch
        open_to = [
            place
            for place, (key, spec) in enumerate(zip(keys, interface.inputs, strict=True))
            if growths[place] == PLAIN and spec.shape[:1] == (self.batch,) and self._may_grow(key)
        ]
        scaled = self._scaled_call(signature, tuple(growths), tuple(open_to[:_MOST_ASSUMED]))
        self._counts.setdefault(call.signature, Counter())[scaled] += 1
        for key, before, growth in zip(keys, map(self._growth_of, keys), scaled.inputs, strict=True):
            if growth == GROWS and before != GROWS:
                self._set(key, growth)
                if key in self._makers:
                    reason = "its result has the batch, but it is unknown which of its arguments contain it"
                    self._counts[self._makers[key]] = Counter([ScaledCall((), lost=reason)])
        for number, spec, growth in zip(call.outputs, interface.outputs, scaled.outputs, strict=False):
            if number != NO_STORAGE:
                key = (number, spec.shape, spec.stride, spec.offset)
                self._set(key, growth)
                if key not in keys:
                    self._makers[key] = call.signature

    def _may_grow(self, key: tuple[Any, ...]) -> bool:
        # an expanded parameter may have the batch
        return key[0] not in self._parameters or key in self._makers

    def _growth_of(self, key: tuple[Any, ...]) -> Growth:
        if key in self._growths:
            return self._growths[key]
        growth = self._storage_growths.get(key[0], PLAIN)
        return "one of its tensors is a part of memory that no recorded call returned" if growth == GROWS else growth

    def _set(self, key: tuple[Any, ...], growth: Growth) -> None:
        self._growths[key] = growth
        self._storage_growths.setdefault(key[0], growth)

    def _scaled_call(self, signature: Signature, growths: tuple[Growth, ...], open_to: tuple[int, ...]) -> ScaledCall:
        key = (signature.number, growths, open_to)
        if key not in self._scaled_calls:
            self._scaled_calls[key] = _find_scaled_call(signature, growths, open_to, self.batch)
        return self._scaled_calls[key]


def _find_scaled_call(
    signature: Signature, growths: tuple[Growth, ...], open_to: tuple[int, ...], batch: int
) -> ScaledCall:
    count = max(len(list(tensors(signature.outputs))), 1)
    lost = next((growth for growth in growths if growth not in (PLAIN, GROWS, ITEM)), None)
    if lost is None and GROWS not in growths:
        if signature.op not in _JOINING or set(growths) != {ITEM} or len(growths) != batch:
            return ScaledCall(growths, (ITEM if ITEM in growths else PLAIN,) * count)
        lost = f"{signature.op} joins the elements of the batch, and lists of tensors are not scaled"
    if lost is None:
        reasons: list[str] = []
        for added in sorted(product((False, True), repeat=len(open_to)), key=sum):
            grown = list(growths)
            for place, is_added in zip(open_to, added, strict=True):
                grown[place] = GROWS if is_added else PLAIN
            for sizes in (True, False) if signature.op in _RESHAPING else (False, True):
                results = _result_growths(signature, grown, sizes)
                if not isinstance(results, str):
                    return ScaledCall(tuple(grown), results, sizes)
                reasons.append(results)
        lost = f"{signature.op} cannot be scaled with the batch as its first dimension: {reasons[0]}"
    return ScaledCall(growths, (lost,) * count, lost=lost)


def _result_growths(signature: Signature, growths: Sequence[Growth], sizes: bool) -> tuple[Growth, ...] | str:
    function = _operator_of(signature)
    if function is None:
        return "the operator's use of its arguments is unknown"
    if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(function.tags):
        return "the shapes of its results depend on values"
    specs = list(tensors([signature.args, signature.kwargs]))
    if _reorders_batch(signature, specs, growths):
        return "it reorders the batch by an index tensor whose size does not grow with the batch"
    try:
        shapes = _result_shapes(function, _with_batch(signature, growths, sizes, _FACTOR))
        before = [spec.shape for spec in tensors(signature.outputs)]
        if any(0 in shape for shape in before):
            # results that are empty only on some devices
            before = _result_shapes(function, signature)
    except Exception as error:
        return one_line(error)
    if len(shapes) == len(before) * _FACTOR and signature.op in _CUTTING:
        return (ITEM,) * len(before)
    if len(shapes) != len(before):
        return f"it returns {len(shapes)} tensors instead of {len(before)}"
    plain = ITEM if signature.op in _CUTTING and growths[0] == GROWS else PLAIN
    result_growths = []
    for old, new in zip(before, shapes, strict=True):
        if new != old and new != (*(size * _FACTOR for size in old[:1]), *old[1:]):
            return f"a result of shape {old} becomes {new} with {_FACTOR} times the batch"
        result_growths.append(plain if new == old else GROWS)
    if signature.op == "aten.slice.Tensor" and result_growths == [ITEM] and before[0][0] > 1:
        return "it takes a part of the batch"
    return tuple(result_growths)


def _result_shapes(function: Any, signature: Signature) -> list[tuple[int, ...]]:
    with torch.no_grad():
        results = function(*map_leaves(_meta_leaf, signature.args), **map_leaves(_meta_leaf, signature.kwargs))
    values, recorded = list(leaves(results)), list(leaves(signature.outputs))
    if len(values) == len(recorded):
        # files of other tools lack some results
        values = [value for value, record in zip(values, recorded, strict=True) if not isinstance(record, Opaque)]
    return [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]


def _reorders_batch(signature: Signature, specs: Sequence[TensorSpec], growths: Sequence[Growth]) -> bool:
    if signature.op == "aten.index_select.default":
        first = signature.args[1] % max(len(specs[0].shape), 1) == 0
    else:
        first = signature.op == "aten.index.Tensor" and isinstance(signature.args[1][0], TensorSpec)
    return first and growths[:2] == [GROWS, PLAIN] and specs[1].shape == specs[0].shape[:1]


def _with_batch(signature: Signature, growths: Sequence[Growth], sizes: bool, factor: int) -> Signature:
    growth_of_tensor = iter(growths)

    def scale(leaf: Any) -> Any:
        return _grown(leaf, next(growth_of_tensor), factor) if isinstance(leaf, TensorSpec) else leaf

    def scale_size(value: Any) -> Any:
        if isinstance(value, list | tuple) and value:
            return type(value)([scale_size(value[0]), *value[1:]])
        return value * factor if type(value) is int and value > 0 else value

    args, kwargs = map_leaves(scale, signature.args), map_leaves(scale, signature.kwargs)
    if sizes:
        names = [name for name, _ in _named_arguments(signature)]
        args = tuple(
            scale_size(value) if name in _SIZE_ARGUMENTS else value for name, value in zip(names, args, strict=False)
        )
        kwargs = {name: scale_size(value) if name in _SIZE_ARGUMENTS else value for name, value in kwargs.items()}
    return replace(signature, args=args, kwargs=kwargs)


def _grown(spec: TensorSpec, growth: Growth, factor: int) -> TensorSpec:
    if growth != GROWS:
        return spec
    if spec.stride is None or spec.made_of is not None:
        raise Unsupported("a tensor that is sparse, quantized or nested has no batch dimension to scale")
    step, *steps = spec.stride
    inner = max((size * stride for size, stride in zip(spec.shape[1:], steps, strict=True) if size > 1), default=1)
    if spec.shape[0] == 1:
        # operators choose the stride of a dimension of size one freely
        step = max(step, inner)
    elif 0 < step < inner:
        raise Unsupported("the batch is not the outermost dimension of a tensor's memory")
    return replace(spec, shape=(spec.shape[0] * factor, *spec.shape[1:]), stride=(step, *steps))


def _meta_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    if isinstance(leaf, GeneratorSpec):
        return None
    if not isinstance(leaf, TensorSpec):
        return leaf
    if leaf.stride is None or leaf.made_of is not None:
        raise Unsupported("one of its tensors is sparse, quantized or nested")
    memory = torch.empty(leaf.extent // max(leaf.dtype.itemsize, 1), dtype=leaf.dtype, device="meta")
    return as_recorded(memory.as_strided(leaf.shape, leaf.stride, leaf.offset), replace(leaf, requires_grad=False))


def scaled(case: Case, factor: int, batches: BatchScale) -> Case:
    verdict = batches.verdict(case.trace_number)
    signature = _with_batch(case.signature, verdict.inputs, verdict.sizes, factor)
    growths = iter(verdict.outputs)
    outputs = map_leaves(
        lambda leaf: _grown(leaf, next(growths), factor) if isinstance(leaf, TensorSpec) else leaf, signature.outputs
    )
    changed = signature != case.signature or outputs != signature.outputs
    return replace(case, signature=replace(signature, outputs=outputs), input_sets=()) if changed else case
