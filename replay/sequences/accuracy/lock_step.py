"""Runs of a step that follow the reference's run call by call, and share its memory where their values are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from opgrip.errors import one_line
from opgrip.replay.cases.flow import FlowingCall
from opgrip.replay.inputs.filling import memory_of
from opgrip.replay.inputs.inputs import as_recorded
from opgrip.replay.modes import RunOutputs
from opgrip.replay.operators.devices import is_accelerator, module_of
from opgrip.replay.operators.memory import Arguments, Function
from opgrip.replay.sequences.accuracy.differences import LARGEST, has_no_number, relative_error
from opgrip.replay.sequences.accuracy.variant import CallKind, VariantPrograms
from opgrip.replay.sequences.dry_run import REPLAYED, CallPlan, DryRun, switching, tensors_of
from opgrip.replay.sequences.step_memory import StepMemory
from opgrip.replay.timing.rounds import NO_ROW
from opgrip.traces.rebuild import tensor_over
from opgrip.traces.schema.arguments import TensorSpec, map_leaves
from opgrip.traces.schema.records import NO_STORAGE


class Overlay:
    """The memory of a run: separate storages where its values differ from the reference's.

    errors : relative error of the values that were written last, by number of the storage
    """

    def __init__(self, base: StepMemory) -> None:
        self._base = base
        self.own: dict[int, torch.UntypedStorage] = {}
        self.errors: dict[int, float] = {}

    def view(self, number: int, spec: TensorSpec) -> Tensor:
        storage = self.own.get(number)
        return self._base.view(number, spec) if storage is None else as_recorded(tensor_over(storage, spec), spec)

    def give(self, number: int, storage: torch.UntypedStorage) -> None:
        self.forget((number,))
        self._base.charge(storage.nbytes())
        self.own[number] = storage

    def separate(self, number: int) -> None:
        if number not in self.own and number in self._base.live:
            self.give(number, self._base.live[number].clone())

    def forget(self, numbers: Sequence[int]) -> None:
        """Use the reference's values in these storages from now on."""
        for number in numbers:
            self.errors.pop(number, None)
            storage = self.own.pop(number, None)
            if storage is not None:
                self._base.refund(storage.nbytes())


@dataclass(frozen=True, slots=True)
class Target:
    """A result of a call: a tensor that it returned, or an argument that it wrote.

    place : index among the tensors that the call returned; None for an argument
    """

    number: int
    tensor: Tensor
    place: int | None
    spec: TensorSpec | None = None


@dataclass(slots=True)
class CallRun:
    """A call of the reference's run.

    arguments : the arguments; for a call that writes into them, a copy from before the run
    used : the arguments with which it ran
    targets : results in memory that no earlier call used, and arguments that the call wrote
    """

    index: int
    call: FlowingCall
    kind: CallKind
    arguments: Arguments
    used: Arguments
    result: Any = None
    targets: list[Target] = field(default_factory=list)


@dataclass(slots=True)
class Follower:
    """A run that follows the reference's run.

    switched : whether the call with an index runs the variant's program
    perturbation : if not None, each result is changed at random by up to half of this part of its size, or of its last
        place if that is larger
    rejoined : why the run continues with the reference's results, by index of the call
    lost : indices of the calls whose results are not finite although the reference's are
    results : relative error of the step's results, by number of the storage
    error, error_before : relative errors of the results and of the inputs of the call that ran last
    """

    overlay: Overlay
    programs: VariantPrograms | None
    switched: Callable[[int], bool]
    perturbation: float | None = None
    rejoined: dict[int, str] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    results: dict[int, float] = field(default_factory=dict)
    _generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    _arguments: Arguments | None = None
    _program: Function | None = None
    error: float = 0.0
    error_before: float = 0.0

    def begin(self, run: CallRun, plan: CallPlan, program: Function | None) -> None:
        """Prepare a call before the reference runs it."""
        call, overlay = run.call, self.overlay
        inputs = [number for number in call.inputs if number in overlay.own]
        self.error_before = max((overlay.errors.get(number, 0.0) for number in inputs), default=0.0)
        self.error, self._arguments = 0.0, None
        self._program = program if self.programs is not None and self.switched(run.index) else None
        is_active = bool(inputs or self._program) or self.perturbation is not None
        if plan.status != REPLAYED or plan.prepared is None or run.kind.is_uninitialized or not is_active:
            return
        try:
            for number, is_written in zip(call.inputs, run.kind.written, strict=False):
                if is_written and number != NO_STORAGE:
                    overlay.separate(number)
            self._arguments = plan.prepared.arguments(overlay, call.inputs)
        except Exception as error:
            self.rejoined[run.index] = one_line(error)
            overlay.forget(call.inputs)

    def follow(self, run: CallRun, random_state: Sequence[Tensor], device: str) -> None:
        """Run the call after the reference has run it."""
        if self._arguments is None:
            self.overlay.forget([target.number for target in run.targets])
            return
        args, kwargs = self._arguments
        self._arguments = None
        try:
            if random_state:
                set_random_state(device, random_state)
            ours = (self._program or run.kind.operator.function)(*args, **kwargs)
            self._take(run, tensors_of(ours))
        except Exception as error:
            if self._program is not None and self.programs is not None:
                self.programs.remove(run.call, error)
            self.rejoined[run.index] = one_line(error)
            self.overlay.forget([target.number for target in run.targets])

    def _take(self, run: CallRun, ours: Sequence[Tensor]) -> None:
        groups: dict[int, list[tuple[Target, Tensor]]] = {}
        for target in run.targets:
            if target.spec is not None:
                own = self.overlay.view(target.number, target.spec)
            else:
                assert target.place is not None
                own = ours[target.place]
            if own.shape != target.tensor.shape:
                # the number of results depends on values, and later calls take the recorded number
                self.rejoined[run.index] = (
                    f"its results have the shape {list(own.shape)}, not {list(target.tensor.shape)}"
                )
                self.overlay.forget([target.number for target in run.targets])
                self.error = LARGEST
                return
            groups.setdefault(target.number, []).append((target, own))
        for number, pairs in groups.items():
            self._keep(run, number, pairs)

    def _keep(self, run: CallRun, number: int, pairs: Sequence[tuple[Target, Tensor]]) -> None:
        if self.perturbation is not None:
            for target, own in pairs:
                is_own = own.data_ptr() != target.tensor.data_ptr()
                if is_own and own.is_floating_point() and own.itemsize > 1:
                    perturb(own, self.perturbation, self._generator)
        error = max(relative_error(own, target.tensor) for target, own in pairs)
        self.error = max(self.error, error)
        is_whole = pairs[0][0].spec is None or _is_whole(pairs[0][0].tensor)
        if error == 0 and is_whole:
            self.overlay.forget((number,))
            return
        if error >= LARGEST and any(has_no_number(own) for _, own in pairs):
            self.lost.append(run.index)
        if pairs[0][0].spec is None:
            self.overlay.give(number, _placed(pairs))
        earlier = 0.0 if is_whole else self.overlay.errors.get(number, 0.0)
        self.overlay.errors[number] = max(error, earlier)


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.itemsize >= tensor.untyped_storage().nbytes()


def _placed(pairs: Sequence[tuple[Target, Tensor]]) -> torch.UntypedStorage:
    """Return the values of a run in memory with the layout that later calls expect."""
    like = pairs[0][0].tensor.untyped_storage()
    is_partial = len(pairs) > 1 or not _is_whole(pairs[0][0].tensor)
    storage = like.clone() if is_partial else torch.UntypedStorage(like.nbytes(), device=like.device)
    for target, own in pairs:
        tensor = target.tensor
        place = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        place.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        try:
            place.copy_(own)
        except RuntimeError:
            # elements share memory: each holds the value of the last one
            flat = memory_of(own.to(tensor.dtype).untyped_storage())
            if len(flat) == len(memory_of(storage)):
                memory_of(storage).copy_(flat)
    return storage


@torch.no_grad()
def perturb(tensor: Tensor, part: float, generator: torch.Generator) -> None:
    """Change each element at random by up to half of `part` of its size, or by its last place if that is larger."""
    eps = torch.finfo(tensor.dtype).eps
    noise = torch.empty(tensor.shape, dtype=torch.float32)
    if part > eps:
        noise.uniform_(-part / 2, part / 2, generator=generator)
    else:
        # a smaller change would be lost by rounding
        noise.random_(0, 2, generator=generator).mul_(2 * eps).sub_(eps)
    tensor.copy_(tensor + tensor * noise.to(tensor.device))


def detached(arguments: Arguments) -> Arguments:
    """Return a copy of a call's arguments, in which tensors share memory as in the call."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
            return leaf
        storage = leaf.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()
        own = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        return own.set_(storages[storage._cdata], leaf.storage_offset(), leaf.shape, leaf.stride())

    args, kwargs = arguments
    return tuple(map_leaves(copy, args)), map_leaves(copy, kwargs)


def picked(run: RunOutputs, written: Sequence[bool]) -> list[Tensor]:
    """Return the tensors that a call returned and those that it wrote."""
    outputs = [leaf for leaf in run.outputs if isinstance(leaf, Tensor)]
    pairs = zip(run.arguments, written, strict=False)
    return outputs + [leaf for leaf, is_written in pairs if is_written and isinstance(leaf, Tensor)]


def random_state(device: str) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, module_of(device).get_rng_state(device)] if is_accelerator(device) else states


def set_random_state(device: str, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        module_of(device).set_rng_state(state, device)


# function that is called after each call that all runs have run, with the program of the variant
Observe: TypeAlias = Callable[[CallRun, Function | None], None]


def run_together(
    dry_run: DryRun,
    programs: VariantPrograms,
    followers: Sequence[Follower],
    device: str,
    results: Mapping[int, Sequence[int]],
    observe: Observe | None = None,
    on_call: Callable[[int], None] = lambda index: None,
) -> None:
    """Run the step once in the reference and in the runs that follow it; the caller has restored its state.

    results : numbers of the storages that hold the step's results after a call, by index of the call
    """
    memory = dry_run.memory
    with switching() as use:
        for index, (call, plan) in enumerate(zip(dry_run.flow.calls, dry_run.plans, strict=True)):
            use(call.settings)
            on_call(index)
            if plan.prepared is None:
                dry_run.pass_on_results(call, plan, None)
            else:
                dry_run.announce(call.signature, NO_ROW)
                _run_call(dry_run, programs, followers, device, observe, (index, call, plan))
            memory.drop(call.over)
            for follower in followers:
                for number in results.get(index, ()):
                    follower.results[number] = follower.overlay.errors.get(number, 0.0)
                follower.overlay.forget(call.over)
    for follower in followers:
        follower.overlay.forget(list(follower.overlay.own))


def _run_call(
    dry_run: DryRun,
    programs: VariantPrograms,
    followers: Sequence[Follower],
    device: str,
    observe: Observe | None,
    place: tuple[int, FlowingCall, CallPlan],
) -> None:
    index, call, plan = place
    assert plan.prepared is not None, "the caller checked it"
    memory, signature = dry_run.memory, dry_run.flow.signatures[call.signature]
    if plan.refilled:
        dry_run.refill(call, plan)
        for follower in followers:
            follower.overlay.forget([call.inputs[index] for index in plan.refilled])
    kind = programs.kind_of(signature)
    args, kwargs = plan.prepared.arguments(memory, call.inputs)
    new = {number for number in call.outputs if number not in memory.live and number != NO_STORAGE}
    has_results = bool(new) or any(kind.written)
    program = programs.program(call, signature, lambda: detached((args, kwargs))) if has_results else None
    is_observed = observe is not None and program is not None
    used = args, kwargs
    run = CallRun(index, call, kind, detached(used) if is_observed and kind.operator.mutates else used, used)
    for follower in followers:
        follower.begin(run, plan, program)
    state = random_state(device) if kind.is_random else []
    run.result = plan.prepared.function(*args, **kwargs)
    dry_run.pass_on_results(call, plan, run.result)
    if plan.status == REPLAYED:
        run.targets = list(_targets(dry_run, run, new))
    after = random_state(device) if state else []
    for follower in followers:
        follower.follow(run, state, device)
    if after:
        set_random_state(device, after)
    if observe is not None:
        observe(run, program)


def _targets(dry_run: DryRun, run: CallRun, new: set[int]) -> Iterator[Target]:
    call = run.call
    for place, (number, tensor) in enumerate(zip(call.outputs, tensors_of(run.result), strict=False)):
        if number in new and tensor.layout is torch.strided and not tensor.is_quantized:
            yield Target(number, tensor, place)
    specs = dry_run.flow.interfaces[call.signature].inputs
    for number, spec, is_written in zip(call.inputs, specs, run.kind.written, strict=False):
        if is_written and number != NO_STORAGE and dry_run.memory.holds(number, spec):
            yield Target(number, dry_run.memory.view(number, spec), None, spec)
