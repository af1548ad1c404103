"""Batch scaling: infers from operators and dataflow which dimension of each tensor is the batch, and multiplies it.

The first tensors known to contain the batch are the data of the operators in `ANCHORS`. Other tensors follow if a call
would otherwise be impossible with a larger batch. The calls are traversed until nothing changes, at most `PASSES`
times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from opgrip.replay.batch_scale.growth import NOTHING, PLAIN, ArgumentChoice, Growth, grown, growth_of
from opgrip.replay.batch_scale.trials import Judge, ScaledCall, with_asked, with_growth
from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.flow import FlowingCall, make_flow
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.traces import Trace
from opgrip.traces.schema.arguments import TensorSpec, map_leaves, tensors
from opgrip.traces.schema.records import EXTENSION, NO_STORAGE, OPERATOR, Signature

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


@dataclass(frozen=True, slots=True)
class Phased:
    """A call and its phase (forward, backward or optimizer)."""

    call: FlowingCall
    phase: str


def parameters(calls: list[Phased], signatures: Mapping[int, Signature]) -> tuple[set[int], set[int]]:
    """Return two sets of storage numbers: all storages that exist before the first call, and the subset that holds
    parameters.
    """
    result_memory: set[int] = set()
    outside: set[int] = set()
    trained: set[int] = set()
    learning: set[int] = set()
    data: set[int] = set()
    roles = {number: list(named_tensors(signature)) for number, signature in signatures.items()}
    for phased in calls:
        call, forward = phased.call, phased.phase == "forward"
        outside.update(number for number in call.inputs if number not in result_memory and number != NO_STORAGE)
        result_memory.update(number for number in call.outputs if number not in outside)
        if phased.phase == "optimizer":
            trained.update(call.inputs)
            continue
        if forward and call.op in ANCHORS:
            data.add(call.inputs[ANCHORS[call.op]])
        for number, (spec, name) in zip(call.inputs, roles.get(call.signature, ()), strict=False):
            if name in _PARAMETERS or (name == "mat2" and forward):
                trained.add(number)
            elif spec.requires_grad:
                learning.add(number)
    # a network's data may require gradients too
    return outside, (trained | learning - data) & outside


def named_tensors(signature: Signature) -> Iterator[tuple[TensorSpec, str]]:
    """Yield (tensor, argument name) for each tensor argument of a call; the name is empty if unknown."""
    names: list[str] = []
    if signature.kind == OPERATOR:
        try:
            names = [argument.name for argument in find_operator(signature).function._schema.arguments]  # type: ignore[attr-defined]
        except Unsupported:
            names = []
    names += [""] * (len(signature.args) - len(names))
    for name, value in (*zip(names, signature.args, strict=False), *signature.kwargs.items()):
        for spec in tensors(value):
            yield spec, name


PASSES = 8  # maximum number of traversals; if a call reveals something about earlier calls, the next traversal uses it

CALL, OUTSIDE = "call", "outside"
# where a tensor's values come from, which decides whether it grows: `CALL` with the number of a signature that takes
# sizes, or `OUTSIDE` with a storage that exists before the first call
Origin: TypeAlias = tuple[str, int]
Key: TypeAlias = tuple[int, int]  # a tensor, identified by its storage and a number for shape, strides and offset


@dataclass(slots=True)
class _Pass:
    """The knowledge about tensors that one traversal of the calls collects.

    growths, origins : growth of each tensor (which of its sizes and strides the batch multiplies), and where its values
        come from
    memory : for each storage, the growth of its first tensor that grows, or of its first tensor if none grows
    verdicts : for each signature, how many of its calls scale in which way
    requested_origins : origins (calls or storages) whose tensors are to grow from the next traversal on
    begun : True once a tensor grows
    guessed : True if the growth of a matrix product's rows was assumed before any tensor was known to grow; the
        traversal is then repeated
    """

    growths: dict[Key, Growth] = field(default_factory=dict)
    origins: dict[Key, tuple[Origin, ...]] = field(default_factory=dict)
    memory: dict[int, Growth] = field(default_factory=dict)
    verdicts: dict[int, Counter[ScaledCall]] = field(default_factory=dict)
    requested_origins: set[Origin] = field(default_factory=set)
    begun: bool = False
    guessed: bool = False


class BatchScale:
    """Finds out which dimensions of a trace's tensors are the batch.

    The batch size is inferred from the data of the network's first operator. It should be larger than one, because with
    a batch of one, wrong assumptions are rarely contradicted by calls.
    """

    def __init__(self, trace: Trace) -> None:
        flow = make_flow(trace)
        phases = trace.own_calls["phase"].tolist()
        self._calls = [Phased(call, str(phase)) for call, phase in zip(flow.calls, phases, strict=True)]
        self._signatures, self._interfaces = flow.signatures, flow.interfaces
        self._outside, self._parameters = parameters(self._calls, flow.signatures)
        self._shapes: dict[Any, int] = {}
        self._keys = {
            number: [[self._shape(spec) for spec in specs] for specs in (interface.inputs, interface.outputs)]
            for number, interface in flow.interfaces.items()
        }
        self._first: dict[int, TensorSpec] = {}
        self._tried: dict[int, set[ArgumentChoice]] = {}
        self._entering: dict[int, Growth] = {}
        self._forced: dict[Key, Growth] = {}
        self._verdicts: dict[int, ScaledCall] = {}
        self.batch = self._batch()
        self._judge = Judge(self.batch)
        if self.batch:
            self._find_out()

    def verdict(self, number: int) -> ScaledCall:
        """Return how most calls of the signature with this number change with the batch; raise `Unsupported` if this is
        unknown.
        """
        if not self.batch:
            raise Unsupported(
                "the batch size of the trace is unknown: it contains no convolution, embedding or matrix product"
            )
        verdict = self._verdicts.get(number)
        if verdict is None:
            raise Unsupported("the trace has no call of this signature")
        if verdict.lost is not None:
            raise Unsupported(verdict.lost)
        return verdict

    def _shape(self, spec: TensorSpec) -> int:
        return self._shapes.setdefault((spec.shape, spec.stride, spec.offset), len(self._shapes))

    def _batch(self) -> int:
        """Return the batch size, or 0 if it is unknown.

        It is the size of dimension 0 of the data argument of the first forward call of an operator in `ANCHORS`.
        """
        for phased in self._calls:
            call = phased.call
            place = ANCHORS.get(call.op)
            specs = self._interfaces[call.signature].inputs
            if place is None or phased.phase != "forward" or call.inputs[place] in self._parameters:
                continue
            if not specs[place].shape:
                continue
            size = specs[place].shape[0]
            if call.op in ROWS:
                # rows may be a product of sizes, which are separate in tensors that entered earlier
                first = self._entered_before(call)
                return next((shape[0] for shape in first if shape and shape[0] and size % shape[0] == 0), size)
            return size
        return 0

    def _entered_before(self, until: FlowingCall) -> list[tuple[int, ...]]:
        shapes = []
        for phased in self._calls:
            specs = self._interfaces[phased.call.signature].inputs
            for number, spec in zip(phased.call.inputs, specs, strict=True):
                if number in self._outside and number not in self._parameters and len(spec.shape) > 1:
                    shapes.append(spec.shape)
            if phased.call is until:
                break
        return shapes

    def _find_out(self) -> None:
        for _ in range(PASSES):
            going = _Pass()
            for phased in self._calls:
                self._go(going, phased)
                if going.guessed:
                    break
            if not going.requested_origins:
                break
        self._verdicts = {number: _most_frequent(counts) for number, counts in going.verdicts.items()}

    def _go(self, going: _Pass, phased: Phased) -> None:
        call, signature = phased.call, self._signatures.get(phased.call.signature)
        if signature is None or signature.raised is not None:
            return
        argument_keys, result_keys = self._keys[call.signature]
        keys = list(zip(call.inputs, argument_keys, strict=True))
        growths = tuple(
            self._find_growth(going, key, spec)
            for key, spec in zip(keys, self._interfaces[call.signature].inputs, strict=True)
        )
        asks = self._anchored(going, phased, signature, keys, growths)
        verdict = self._judge.judge(signature, with_asked(growths, asks))
        if not any(self._is_parameter(going, keys[place]) for place, _ in verdict.asks):
            asks += verdict.asks
        # how rows are composed of sizes is known once their inputs grow
        going.guessed = bool(asks) and signature.op in ROWS and not going.begun
        for place, growth in asks:
            self._ask(going, keys[place], growth, signature, place)
        if asks:
            verdict = self._judge.judge(signature, with_asked(growths, asks))
        going.verdicts.setdefault(call.signature, Counter())[verdict] += 1
        origins = self._origins(going, signature, keys, verdict)
        for key, growth in zip(zip(call.outputs, result_keys, strict=False), verdict.outputs, strict=False):
            if key[0] != NO_STORAGE:
                going.growths[key] = growth
                going.origins[key] = origins
                going.begun = going.begun or growth.any
                if growth != PLAIN or key[0] not in going.memory:
                    going.memory[key[0]] = growth
        if signature.kind == EXTENSION and verdict.lost is not None:
            # it may write its results into any of its arguments
            going.growths.update((key, verdict.outputs[0]) for key in keys if not going.growths.get(key, PLAIN).any)

    def _is_parameter(self, going: _Pass, key: Key) -> bool:
        """Return True if a tensor is in a parameter's storage, unless the current traversal (`going`) knows where the
        tensor's values come from, as for an expanded parameter.
        """
        return key[0] in self._parameters and not going.origins.get(key)

    def _find_growth(self, going: _Pass, key: Key, spec: TensorSpec) -> Growth:
        earlier_growth = self._forced.get(key) or going.growths.get(key)
        if earlier_growth is not None:
            return earlier_growth
        if key[0] in self._parameters:
            return PLAIN
        whole = going.memory.get(key[0])
        if whole is not None:
            lost = whole.lost or ("a part of memory that no recorded call returned" if whole.any else None)
            return whole if lost is None else Growth(lost=lost)
        if key[0] not in self._outside:
            return PLAIN
        self._first.setdefault(key[0], spec)
        growth = self._entering.get(key[0], PLAIN)
        going.growths[key] = growth
        going.origins[key] = ((OUTSIDE, key[0]),)
        going.memory[key[0]] = growth
        going.begun = going.begun or growth.any
        return growth

    def _anchored(
        self, going: _Pass, phased: Phased, signature: Signature, keys: Sequence[Key], growths: Sequence[Growth]
    ) -> tuple[tuple[int, Growth], ...]:
        """Return ((argument index, growth),) if the data argument of an operator in `ANCHORS` does not grow yet but
        should grow with the batch, otherwise an empty tuple.
        """
        place = ANCHORS.get(signature.op)
        if place is None or phased.phase != "forward" or growths[place] != PLAIN:
            return ()
        if not going.origins.get(keys[place]):
            return ()
        spec = self._interfaces[signature.number].inputs[place]
        if signature.op not in IMAGES and going.begun:
            return ()
        batch_dimensions = [at for at, size in enumerate(spec.shape) if size == self.batch]
        if signature.op in IMAGES:
            batch_dimensions = [at for at in batch_dimensions if at == 0]
        elif signature.op in ROWS and not batch_dimensions and spec.shape and spec.shape[0] % self.batch == 0:
            batch_dimensions = [0]
        return ((place, growth_of(spec, batch_dimensions[:1])),) if batch_dimensions else ()

    def _ask(self, going: _Pass, key: Key, growth: Growth, signature: Signature, place: int) -> None:
        """Let a tensor grow with the batch in this traversal (`going`). From the next traversal on, the tensors from
        which its values come grow instead, if they can.
        """
        origins = going.origins.get(key, ())
        going.begun = True
        going.growths[key] = growth
        if origins and not going.requested_origins.isdisjoint(origins):
            return
        going.requested_origins.update(origins or ((OUTSIDE, key[0]),))
        spec = self._interfaces[signature.number].inputs[place]
        # try sizes that give exactly the requested growth first, then any
        if not any(self._answer(origin, growth, spec, fits) for fits in (True, False) for origin in origins):
            self._forced[key] = growth

    def _answer(self, origin: Origin, growth: Growth, spec: TensorSpec, fits: bool) -> bool:
        """Mark the tensors of an origin as growing from the next traversal on; return False if they already grow or
        cannot grow.
        """
        kind, number = origin
        if kind == OUTSIDE:
            if number in self._entering:
                return False
            first = self._first[number]
            same = first.shape == spec.shape
            sizes = growth.sizes if same else [at for at, size in enumerate(first.shape) if size == self.batch][:1]
            if sizes:
                self._entering[number] = growth_of(first, sizes)
            return bool(sizes)
        signature = self._signatures[number]
        tried = self._tried.setdefault(number, set())
        for choice in self._judge.own(signature):
            if choice not in tried and (not fits or growth.sizes in self._judge.sizes(signature, choice)):
                self._judge.chosen[number] = choice
                tried.add(choice)
                return True
        return False

    def _origins(
        self, going: _Pass, signature: Signature, keys: Sequence[Key], verdict: ScaledCall
    ) -> tuple[Origin, ...]:
        origins = dict.fromkeys(origin for key in keys for origin in going.origins.get(key, ()))
        own = verdict.choice == NOTHING and not any(growth.any for growth in verdict.outputs)
        if own and self._judge.own(signature):
            return (CALL, signature.number), *list(origins)[:1]
        return tuple(origins)[:2]


def _most_frequent(counts: Counter[ScaledCall]) -> ScaledCall:
    """Return the most frequent way in which a signature's calls scale; ways of which all growths are known come before
    the others.
    """
    return max(counts, key=lambda verdict: (verdict.lost is None, counts[verdict]))


def scaled(case: Case, factor: int, batches: BatchScale) -> Case:
    """Return a copy of a case with a batch `factor` times as large; the case itself if it does not depend on the batch.

    Captured facts such as time and count do not change. Values are drawn for the new shapes.
    Raises `Unsupported` if it is unknown which sizes contain the batch.
    """
    verdict = batches.verdict(case.trace_number)
    signature = with_growth(case.signature, verdict.inputs, verdict.choice, factor)
    of_result = iter(verdict.outputs)
    outputs = map_leaves(
        lambda leaf: grown(leaf, next(of_result), factor) if isinstance(leaf, TensorSpec) else leaf, signature.outputs
    )
    listed = isinstance(outputs, list) and [growth.item for growth in verdict.outputs] == list(range(batches.batch))
    outputs = outputs * factor if listed else outputs
    changed = signature != case.signature or outputs != signature.outputs
    return replace(case, signature=replace(signature, outputs=outputs), input_sets=()) if changed else case
