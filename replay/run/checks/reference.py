"""The correct results of a call, which come from running it in the reference mode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from opgrip.replay.inputs.filling import CAST
from opgrip.replay.inputs.inputs import Inputs
from opgrip.replay.modes import RunOutputs
from opgrip.replay.operators.contexts import EPS, ROUNDED, OperatorNames, may_use_tf32, takes_float32
from opgrip.replay.operators.devices import module_of
from opgrip.replay.operators.memory import Arguments, Function, tensors_in
from opgrip.replay.run.checks.closeness import (
    Plain,
    ResultPosition,
    Unpaired,
    gap,
    paired,
    plain,
    rounded,
    unsettled,
    verdict_on,
    within,
)
from opgrip.replay.run.checks.permitted_differences import (
    DROPOUT,
    chosen_otherwise,
    drawn_otherwise,
    dropped_otherwise,
    named,
    runs_wanted,
)
from opgrip.replay.run.checks.verdicts import ResultVerdict, Tolerance, joined, wrong
from opgrip.traces.schema.arguments import leaves, map_leaves
from opgrip.traces.schema.tensor_specs import plain_name

FEW = 64  # number of elements of a random result below which two runs may agree by chance
SEEDS_OF_FEW = 8
CHANCE = 30  # number of elements that differ by the seed beyond which two random results do not agree by chance


class Reference:
    """The correct results of one call, with which a mode's results are compared.

    make_arguments : function that returns the same arguments, in their initial state, each time
    """

    def __init__(
        self,
        function: Callable[..., Any],
        make_arguments: Callable[[], Arguments],
        mutates: bool,
        op: str | None,
        unused: Collection[int] = (),
    ) -> None:
        self._function = function
        self._make_arguments = make_arguments
        self._mutates = mutates
        self._unused = unused
        self._operator = named(function, op)
        self._seeded: list[RunOutputs] = []

    def check(self, actual: RunOutputs, tolerance: Tolerance) -> ResultVerdict:
        try:
            return joined(self._verdicts(actual, tolerance))
        except Unpaired as mismatch:
            return wrong(str(mismatch))
        except Exception as error:
            message = " ".join(str(error).split())[:200]
            return wrong(f"cannot be compared: {type(error).__name__}: {message}")

    def drawn_again(self, outputs: Sequence[Any], earlier: Sequence[Any]) -> int | None:
        """Return the number of the first random output that equals that of an earlier run, or None."""
        if _has_generator(self._make_arguments()):
            return None
        if self._operator is not None and self._operator.uninitialized:
            return None
        for place, pair in enumerate(zip(outputs, earlier, strict=False)):
            if place not in self._unused and _same_tensor(*pair):
                one, other = (run.outputs[place] for run in self._runs(2))
                if _differ_beyond_chance(one, other):
                    return place
        return None

    def _verdicts(self, actual: RunOutputs, tolerance: Tolerance) -> list[ResultVerdict]:
        first = self._runs(1)[0]
        chosen: dict[int, str | None] = {}
        if self._operator is not None:
            chosen = chosen_otherwise(self._operator, self._make_arguments(), actual.outputs, first.outputs)
        verdicts = []
        for place, ours in self._pairs(actual, first):
            is_output, operator = place.kind == "output", self._operator
            if is_output and operator is not None and operator.is_generator_state(place.number):
                continue
            if is_output and place.number in chosen:
                reason = chosen[place.number]
                verdict = ResultVerdict() if reason is None else wrong(f"{place}: {reason}")
            else:
                verdict = self._judge(place, ours, actual, tolerance)
            if is_output and place.number in self._unused:
                verdict = ResultVerdict() if verdict.right else ResultVerdict(notes=(f"unused {verdict.reason}",))
            verdicts.append(verdict)
        return verdicts

    def _pairs(self, actual: RunOutputs, first: RunOutputs) -> list[tuple[ResultPosition, Any]]:
        if self._mutates and not actual.arguments and not self._written:
            first = RunOutputs(first.outputs)
        return paired(actual, first)

    def _judge(self, place: ResultPosition, leaf: Any, actual: RunOutputs, tolerance: Tolerance) -> ResultVerdict:
        expected = place.of(self._runs(1)[0])
        if _same_tensor(leaf, expected):
            return ResultVerdict(0.0, 0.0)
        reference = plain(expected)
        if isinstance(leaf, Tensor) and not isinstance(expected, Tensor) and leaf.numel() == 1:
            leaf = leaf.item()
        ours = plain(leaf)
        if reference is None or ours is None:
            same = bool(leaf == expected)
            return ResultVerdict() if same else wrong(f"{place} is {leaf!r:.60}, not {expected!r:.60}")
        if self._operator is not None and self._operator.leaves_empty and reference.shape == (0,):
            return ResultVerdict()
        if ours.dtype is not reference.dtype:
            return wrong(f"{place} is {plain_name(ours.dtype)}, not {plain_name(reference.dtype)}")
        if ours.shape != reference.shape:
            right = self._of_its_own_shape(place, ours, reference, tolerance)
            return ResultVerdict() if right else wrong(f"{place} is {ours.shape}, not {reference.shape}")
        if self._operator is not None and self._operator.uninitialized:
            return ResultVerdict()
        between = gap(ours, reference, tolerance)
        differing = between.exceeds_tolerance
        if bool(differing.any()) and self._varies(place, reference, tolerance):
            reason = self._drawn_otherwise(place, ours, actual, tolerance)
            return ResultVerdict() if reason is None else wrong(f"{place}: {reason}")
        if bool(differing.any()):
            differing = differing & ~self._excused(place, ours, reference, tolerance)
        return verdict_on(str(place), reference, between, differing)

    def _excused(self, place: ResultPosition, ours: Plain, reference: Plain, tolerance: Tolerance) -> Tensor:
        runs = [run for run in self._in_float64(place) if run.shape == ours.shape and run.numeric == ours.numeric]
        if not runs or reference.step is not None:
            return torch.zeros(len(ours.values), dtype=torch.bool)
        if ours.numeric:
            terms = self._terms / max(len(ours.values), 1)
            assert self._truths is not None, "a call with runs in float64 has truths"
            return rounded(ours, reference, runs[0], runs[1:], tolerance, terms, self._truths.tf32)
        return unsettled(ours, [reference, *runs])

    def _of_its_own_shape(self, place: ResultPosition, ours: Plain, reference: Plain, tolerance: Tolerance) -> bool:
        truths = [result.shape for result in self._in_float64(place)]
        drawn = [plain(place.of(run)) for run in self._runs(SEEDS_OF_FEW)]
        by_chance = [result.shape for result in drawn if result is not None]
        return within(ours.shape, [reference.shape, *truths]) or within(ours.shape, by_chance, beyond=True)

    def _drawn_otherwise(
        self, place: ResultPosition, ours: Plain, actual: RunOutputs, tolerance: Tolerance
    ) -> str | None:
        drawn = [plain(place.of(run)) for run in self._runs(runs_wanted(len(ours.values)))]
        reason = drawn_otherwise(ours, [run for run in drawn if run is not None and run.shape == ours.shape])
        if reason is None and self._operator is not None and self._operator.packet in DROPOUT:
            return dropped_otherwise(self._operator, self._make_arguments(), actual.outputs, tolerance)
        return reason

    def _varies(self, place: ResultPosition, reference: Plain, tolerance: Tolerance) -> bool:
        if self._operator is not None and self._operator.is_random(self._make_arguments()):
            return True
        seeds = SEEDS_OF_FEW if len(reference.values) < FEW else 2
        others = [plain(place.of(run)) for run in self._runs(seeds)]
        return any(
            other is not None
            and (other.shape != reference.shape or bool(gap(other, reference, tolerance).exceeds_tolerance.any()))
            for other in others
        )

    def _in_float64(self, place: ResultPosition) -> list[Plain]:
        results = [plain(place.of(run)) for run in self._truths.all] if self._truths is not None else []
        return [run for run in results if run is not None]

    def _runs(self, count: int) -> list[RunOutputs]:
        while len(self._seeded) < count:
            seed = len(self._seeded)
            self._seeded.append(run_seeded(self._function, self._make_arguments(), self._mutates, seed))
        return self._seeded[:count]

    @cached_property
    def _truths(self) -> Truths | None:
        return truths_of(self._function, self._make_arguments, self._mutates, seed=0)

    @cached_property
    def _terms(self) -> int:
        return max((tensor.numel() for tensor in tensors_in(list(self._make_arguments()))), default=0)

    @cached_property
    def _written(self) -> set[int]:
        after = self._runs(1)[0].arguments
        return {
            place for place, pair in enumerate(zip(self._first_arguments, after, strict=False)) if is_changed(*pair)
        }

    @property
    def _first_arguments(self) -> list[Tensor]:
        return tensors_in(list(self._make_arguments()))


def is_changed(before: Tensor, after: Tensor) -> bool:
    one, other = plain(before), plain(after)
    if one is None or other is None or one.shape != other.shape:
        return True
    return bool(gap(one, other, Tolerance(0, 0)).exceeds_tolerance.any())


def _same_tensor(leaf: Any, expected: Any) -> bool:
    if not isinstance(leaf, Tensor) or not isinstance(expected, Tensor):
        return False
    if any(
        tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided for tensor in (leaf, expected)
    ):
        return False
    try:
        return leaf.dtype is expected.dtype and torch.equal(leaf.detach().cpu(), expected.detach().cpu())
    except RuntimeError:
        # torch.equal does not support some dtypes
        return False


WRITES = "writes into its arguments"  # note on a candidate that changes arguments which the reference does not change

_PLAIN = (Tensor, bool, int, float, complex, str, type(None))


class CandidateReference(Reference):
    def _verdicts(self, actual: RunOutputs, tolerance: Tolerance) -> list[ResultVerdict]:
        verdicts = super()._verdicts(actual, tolerance)
        before = self._first_arguments if actual.arguments else []
        changed = {place for place, tensor in enumerate(before) if is_changed(tensor, actual.arguments[place])}
        return [*verdicts, ResultVerdict(notes=(WRITES,))] if changed - self._written else verdicts

    def _pairs(self, actual: RunOutputs, first: RunOutputs) -> list[tuple[ResultPosition, Any]]:
        outputs = paired(RunOutputs(actual.outputs), RunOutputs(first.outputs))
        ours = actual.arguments or (self._first_arguments if self._owed else [])
        return [*outputs, *((ResultPosition("argument", place), ours[place]) for place in sorted(self._owed))]

    @cached_property
    def _owed(self) -> set[int]:
        if not self._written:
            return set()
        args, kwargs = self._make_arguments()
        returned = {_memory(leaf) for leaf in leaves(self._function(*args, **kwargs)) if isinstance(leaf, Tensor)}
        tensors = [leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, Tensor)]
        return {place for place in self._written if _memory(tensors[place]) not in returned}


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def other_structure(ours: Any, reference: Any, where: str = "") -> str | None:
    own, right = _parts(ours), _parts(reference)
    if own is None and right is None and (ours is None) == (reference is None):
        return None
    if own is None or right is None or own.keys() != right.keys():
        return f"returns {_described(ours)}, but the reference returns {_described(reference)}{where}"
    reasons = (other_structure(own[key], right[key], f", in {key!r}{where}") for key in own)
    return next((reason for reason in reasons if reason is not None), None)


def not_comparable(results: Any) -> str | None:
    odd = (type(leaf).__name__ for leaf in leaves(results) if not isinstance(leaf, _PLAIN))
    return next(odd, None)


def in_order_of(results: Any, like: Any) -> Any:
    if isinstance(results, Mapping):
        return {key: in_order_of(results[key], like[key]) for key in like}
    if isinstance(results, list | tuple):
        return [in_order_of(*pair) for pair in zip(results, like, strict=True)]
    return results


def _parts(results: Any) -> dict[Any, Any] | None:
    if isinstance(results, dict):
        return results
    return dict(enumerate(results)) if isinstance(results, list | tuple) else None


def _described(results: Any) -> str:
    parts = _parts(results)
    if parts is None:
        if results is None:
            return "None"
        return "a tensor" if isinstance(results, Tensor) else f"a value of type {type(results).__name__}"
    names = f": {', '.join(map(repr, parts))}" if isinstance(results, dict) else ""
    return f"a {'dictionary' if isinstance(results, dict) else type(results).__name__} of {len(parts)}{names}"


def observe(function: Callable[..., Any], arguments: Arguments, mutates: bool) -> RunOutputs:
    """Run a call and return copies of its results and, if `mutates` is True, of its argument tensors after the run."""
    args, kwargs = arguments
    return RunOutputs.of(function(*args, **kwargs), arguments, mutates, copies=True)


def run_seeded(function: Callable[..., Any], arguments: Arguments, mutates: bool, seed: int) -> RunOutputs:
    with _seeded(arguments, seed):
        return observe(function, arguments, mutates)


@contextmanager
def _seeded(arguments: Arguments, seed: int) -> Iterator[None]:
    used = {tensor.device for tensor in tensors_in(list(arguments)) if tensor.device.type != "cpu"}
    kinds = {device.type for device in used}
    if torch.cuda.is_initialized():
        kinds.add("cuda")
    for leaf in leaves(list(arguments)):
        if isinstance(leaf, torch.Generator):
            leaf.manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        devices = [f"{kind}:{index}" for kind in kinds for index in range(getattr(torch, kind).device_count())]
        states = {device: module_of(device).get_rng_state(device) for device in devices}
        try:
            # torch.manual_seed would also seed accelerators that are not used here
            torch.default_generator.manual_seed(seed)
            for kind in kinds:
                getattr(torch, kind).manual_seed_all(seed)
            yield
        finally:
            for device, state in states.items():
                module_of(device).set_rng_state(state, device)


DISTURBED = 4  # number of runs with arguments that differ in their last bit: all greater, all less, and at random

_ALIKE = (1, -1)
_COMPLEX = frozenset({torch.complex32, torch.complex64})


@dataclass(frozen=True, slots=True)
class Truths:
    """Results of a call computed in float64.

    disturbed : results for slightly changed arguments, which show the effect of rounding
    """

    exact: RunOutputs
    disturbed: tuple[RunOutputs, ...]
    tf32: bool = False

    @property
    def all(self) -> tuple[RunOutputs, ...]:
        return (self.exact, *self.disturbed)


def truths_of(
    function: Callable[..., Any],
    make_arguments: Callable[[], Arguments],
    mutates: bool,
    seed: int,
    disturbances: int = DISTURBED,
) -> Truths | None:
    first = make_arguments()
    strided = [tensor for tensor in tensors_in(list(first)) if tensor.layout is torch.strided]
    if mutates and len({tensor.untyped_storage()._cdata for tensor in strided}) < len(strided):
        # copies in another dtype no longer share memory
        return None
    mode = _InFloat64()
    exact = _attempted(function, _raised(first), mutates, seed, mode)
    if exact is None:
        return None
    # compiled code may use TF32 where eager did not
    tf32 = takes_float32(tensors_in(list(first))) and may_use_tf32(mode.names)
    disturbed = [
        _attempted(function, _raised(make_arguments(), number, tf32), mutates, seed, _InFloat64())
        for number in range(disturbances)
    ]
    return Truths(exact, tuple(run for run in disturbed if run is not None), tf32)


class _InFloat64(OperatorNames):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raised = map_leaves(_raise_dtype, tuple(args)), map_leaves(_raise_dtype, kwargs or {})
        return OperatorNames.__torch_dispatch__(self, func, types, *raised)


def _attempted(
    function: Callable[..., Any], arguments: Arguments, mutates: bool, seed: int, mode: _InFloat64
) -> RunOutputs | None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with mode:
            return run_seeded(function, arguments, mutates, seed)
    except Exception:
        return None
    finally:
        torch.set_default_dtype(before)


def _raise_dtype(leaf: Any) -> Any:
    if not isinstance(leaf, torch.dtype):
        return leaf
    if leaf in CAST:
        return torch.float64
    return torch.complex128 if leaf in _COMPLEX else leaf


def _raised(arguments: Arguments, disturbance: int | None = None, tf32: bool = False) -> Arguments:
    generator = torch.Generator().manual_seed(disturbance or 0)

    def raised(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return _raise_dtype(leaf)
        if leaf.dtype not in CAST | _COMPLEX | {torch.complex128}:
            return leaf
        tensor = leaf.detach().to(_raise_dtype(leaf.dtype))
        if disturbance is not None and leaf.layout is torch.strided and not leaf.is_nested:
            half = (EPS if tf32 and leaf.dtype in ROUNDED else torch.finfo(leaf.dtype).eps) / 2
            signs = torch.randint(2, tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
            if disturbance < len(_ALIKE):
                signs = torch.full_like(signs, _ALIKE[disturbance])
            tensor = tensor * (1 + half * signs.to(tensor.device))
        elif tensor is leaf or tensor.data_ptr() == leaf.data_ptr():
            tensor = tensor.clone()
        return tensor.requires_grad_(leaf.requires_grad)

    args, kwargs = arguments
    return map_leaves(raised, args), map_leaves(raised, kwargs)


SEED, OTHER_SEED = 7_643_251, 7_643_252  # unlike those of inputs, which random numbers must not depend on
VARIES = "differs between two runs on the same arguments"
AGAIN = "is in the memory of an earlier result"
DRAWN_ONCE = "has the random numbers of an earlier run"
MORE_RUNS = 4  # runs of a candidate after two runs with the same random numbers


@dataclass(frozen=True, slots=True)
class _Run:
    inputs: Inputs
    call: Arguments
    outputs: Sequence[Any]
    written: frozenset[int]

    @property
    def arguments(self) -> list[Tensor]:
        return tensors_in(list(self.call))


def check_contract(
    operator: Function, candidate: Function, inputs: Inputs, unused: Collection[int] = (), mutates: bool = False
) -> ResultVerdict:
    """Check what a comparison of results does not show, such as shared memory of outputs and arguments written by
    mistake.

    mutates : whether the operator may change its arguments, so that each run needs new ones
    """
    expected, actual = _run(operator, inputs, SEED), _run(candidate, inputs, SEED)
    faults = [f"writes into argument {place}" for place in sorted(actual.written - expected.written)]
    for place, (ours, theirs) in enumerate(zip(actual.outputs, expected.outputs, strict=False)):
        if place not in unused and isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            faults += [f"output {place} {reason}" for reason in _output_faults(place, ours, theirs, actual, expected)]
    if not faults:
        kept = (None, None) if mutates else (expected, actual)
        other = _run(operator, inputs, OTHER_SEED, kept[0])
        again = _run(candidate, inputs, SEED, kept[1])
        random = _differing(expected, other)
        reasons = dict.fromkeys([] if random else _differing(actual, again), VARIES)
        reused = _returned_again(actual, again)
        for _ in range(MORE_RUNS):
            # only the first run's results are kept, which may be large
            again = _run(candidate, inputs, OTHER_SEED, kept[1])
            reused |= _returned_again(actual, again)
        drawn_once = set() if _has_generator(expected.call) else set(random).difference(_differing(actual, again))
        for place in drawn_once:
            if _differ_beyond_chance(expected.outputs[place], other.outputs[place]):
                reasons[place] = DRAWN_ONCE
        reasons |= dict.fromkeys(reused - _returned_again(expected, other), AGAIN)
        faults += [f"output {place} {reason}" for place, reason in reasons.items() if place not in unused]
    return ResultVerdict(faults=tuple(faults))


def _run(function: Function, inputs: Inputs, seed: int, earlier: _Run | None = None) -> _Run:
    if earlier is None or earlier.written:
        own = inputs.copy()
        args, kwargs = own.make()
    else:
        own, (args, kwargs) = earlier.inputs, earlier.call
    torch.manual_seed(seed)
    outputs = list(leaves(function(*args, **kwargs)))
    return _Run(own, (args, kwargs), outputs, own.written())


def _returned_again(one: _Run, other: _Run) -> set[int]:
    # outputs of a run in the memory of outputs of an earlier run, which are kept
    earlier = set(map(_storages, one.outputs)) - {None, *map(_storages, [*one.arguments, *other.arguments])}
    return {place for place, output in enumerate(other.outputs) if _storages(output) in earlier}


def _output_faults(place: int, ours: Tensor, theirs: Tensor, actual: _Run, expected: _Run) -> Iterator[str]:
    if type(ours) is not type(theirs):
        yield f"is a {type(ours).__name__}, not a {type(theirs).__name__}"
        return
    if ours.layout is not theirs.layout:
        yield f"has the layout {ours.layout}, not {theirs.layout}"
    if torch.strided not in (ours.layout, theirs.layout) or ours.is_nested or theirs.is_nested:
        return
    if ours.shape == theirs.shape and ours.numel() and _strides(ours) != _strides(theirs):
        yield f"has the strides {ours.stride()}, not {theirs.stride()}"
    own, right = _shared(ours, actual.arguments), _shared(theirs, expected.arguments)
    for number in sorted(own.keys() - right.keys()):
        yield f"shares memory with argument {number}, unlike the operator's output"
    for number in sorted(right.keys() - own.keys()):
        yield f"is a copy, but the operator's output shares memory with argument {number}"
    if own.keys() == right.keys() and own != right:
        yield f"starts at element {ours.storage_offset()} of its memory, not {theirs.storage_offset()}"
    before, before_right = (
        set(_shared(run.outputs[place], [item for item in run.outputs[:place] if isinstance(item, Tensor)]))
        for run in (actual, expected)
    )
    if before - before_right and not own:
        yield "shares memory with an earlier output"


def _strides(tensor: Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _shared(output: Tensor, others: Sequence[Tensor]) -> dict[int, int]:
    memory = _storages(output)
    return {
        place: int(output.storage_offset())
        for place, other in enumerate(others)
        if memory is not None and _storages(other) == memory
    }


def _storages(tensor: Any) -> int | None:
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else None


def _has_generator(arguments: Arguments) -> bool:
    # each run may get it in the same state
    return any(isinstance(leaf, torch.Generator) for leaf in leaves(list(arguments)))


def _differ_beyond_chance(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and int((one != other).sum()) > CHANCE


def _differing(one: _Run, other: _Run) -> list[int]:
    return [
        place
        for place, (ours, theirs) in enumerate(zip(one.outputs, other.outputs, strict=False))
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor) and is_changed(ours, theirs)
    ]
