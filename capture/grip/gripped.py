"""A gripped function and its recorded calls."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from opgrip.capture.grip.objects import CannotHold, SpecTree, alike, bytes_of, copy_tensors, isolate_from_program, take
from opgrip.capture.grip.patterns import LOCALS
from opgrip.capture.program.capture_choices import CALLS
from opgrip.capture.program.environment import describe_autocast, describe_context, read_context
from opgrip.capture.signatures.signatures import call_key, tensors_in
from opgrip.capture.torch_compat.compiler_private import (
    OrderlyMode,
    hide_from_compiler,
    leave_compiled,
    see_higher_order,
)
from opgrip.errors import is_from_program, one_line, raise_if_from_program
from opgrip.platform import perf_counter_ns
from opgrip.traces.rebuild import make_arguments
from opgrip.traces.schema.python_objects import SharedSpec

INPUT_AWARE = "InputAware"
DATA_DEPENDENT_SHAPE = "DataDependentShape"
ADVANCED_INDEXING = "AdvancedIndexing"
IN_PLACE = "InPlace"
REDUCE = "Reduce"
BROADCAST = "Broadcast"
VIEW = "ViewAttribute"
# tags of a sample that are derived from a run of its function; other tags are derived from the source
RANDOM = "Random"

_INDEXING = frozenset(
    {
        *("index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put", "gather", "take"),
        *("scatter", "scatter_add", "scatter_reduce", "index_select", "index_add", "index_copy", "index_fill"),
        *("index_reduce", "masked_select", "masked_scatter", "put"),
    }
)
_REDUCTIONS = frozenset(
    {
        *("sum", "nansum", "mean", "amax", "amin", "aminmax", "prod", "norm", "linalg_vector_norm", "any", "all"),
        *("argmax", "argmin", "std", "std_mean", "var", "var_mean", "logsumexp", "median", "nanmedian", "mode"),
        *("count_nonzero", "max", "min"),
    }
)
_DEPENDENT_SHAPES = frozenset(
    {
        *("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
        *("unique_dim_consecutive", "repeat_interleave"),
    }
)
_READS_VALUES = frozenset({"_local_scalar_dense", "item", "equal", "allclose", "is_nonzero"})
_NO_VIEWS = frozenset({"detach", "alias", "lift_fresh", "_conj", "_neg_view"})
_MASKS = (torch.bool, torch.uint8)


class _Spent(threading.local):
    # time in ns that observation took in this thread; subtracted from observed times
    ns = 0


spent = _Spent()


_own = threading.local()


@contextmanager
def own_work() -> Iterator[None]:
    """Do not record the operators that this thread calls inside the `with` block."""
    if at_own_work():
        yield
        return
    start = perf_counter_ns()
    _own.busy = True
    try:
        yield
    finally:
        _own.busy = False
        spent.ns += perf_counter_ns() - start


def at_own_work() -> bool:
    return getattr(_own, "busy", False)


class Running(OrderlyMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        see_higher_order(type(self))
        self.operators = self.operator_ns = 0
        self._tags_by_call: dict[tuple[Any, ...], frozenset[str]] = {}

    @property
    def tags(self) -> frozenset[str]:
        return frozenset[str]().union(*self._tags_by_call.values())

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # otherwise torch would compute other results of compiled code under the mode
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # decides whether torch wraps the handler in its guard, which would import the compiler
        return not cls._hidden

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        entered = perf_counter_ns()
        kwargs = kwargs or {}
        self._look(func, args, kwargs)
        before, start = spent.ns, perf_counter_ns()
        result = func(*args, **kwargs)
        end = perf_counter_ns()
        self.operators += 1
        # subtract the observation of inner calls
        self.operator_ns += end - start - (spent.ns - before)
        spent.ns += start - entered + perf_counter_ns() - end
        return result

    _hidden = hide_from_compiler(cast("FunctionType", __torch_dispatch__))

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            shapes = tuple((tuple(item.shape), item.dtype in _MASKS) for item in tensors_in((*args, *kwargs.values())))
            key = (func, shapes)
            if key not in self._tags_by_call:
                self._tags_by_call[key] = frozenset(tags_of(func, shapes))
        except Exception as error:
            raise_if_from_program(error)
            # an operator whose tags cannot be found must not disturb the program
            self._tags_by_call.setdefault((func,), frozenset())


leave_compiled(Running)


def tags_of(func: Any, shapes: Sequence[tuple[tuple[int, ...], bool]]) -> Iterator[str]:
    """Yield the tags, such as `Reduce`, that a function gets because it called the operator `func`.

    shapes : for each tensor in the arguments, its shape, and True if its dtype is bool or uint8
    """
    name = func._schema.name.partition("::")[2]
    plain = name.rstrip("_")
    torch_tags = {str(tag).rpartition(".")[2] for tag in func.tags}
    if name in _READS_VALUES:
        yield INPUT_AWARE
    masked = plain in ("index", "index_put", "_index_put_impl") and any(mask for _, mask in shapes[1:])
    if name in _DEPENDENT_SHAPES or (name == "index" and masked):
        yield DATA_DEPENDENT_SHAPE
    if plain in _INDEXING:
        yield ADVANCED_INDEXING
    if func._schema.is_mutable:
        yield IN_PLACE
    # max and min of two tensors are elementwise, not reductions
    if plain in _REDUCTIONS and func._overloadname != "other":
        yield REDUCE
    sizes = [shape for shape, _ in shapes if shape]
    if "pointwise" in torch_tags and len(set(sizes)) > 1:
        yield BROADCAST
    if plain not in _NO_VIEWS and any(
        result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns
    ):
        yield VIEW
    if "nondeterministic_seeded" in torch_tags:
        yield RANDOM


@dataclass(frozen=True, slots=True)
class GrippedCall:
    """A recorded call of a gripped function.

    random_state : state of torch's CPU generator before the call, if the call drew random numbers, else None
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any
    after: tuple[tuple[Any, ...], dict[str, Any]] | None
    random_state: Tensor | None
    operators: int
    operator_ns: int
    duration_ns: int
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gripped:
    """A gripped function with its recorded calls, from which a sample is written.

    by_reference : True if the sample imports the function instead of containing its code
    """

    function: Callable[..., Any]
    owner: type | None
    entry: str
    name: str
    tags: frozenset[str]
    calls: Sequence[GrippedCall]
    by_reference: bool = False


# maximum size in bytes of all tensors together in the arguments, and in the results, of a recorded call
MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Keep:
    calls: int = CALLS
    per_signature: int = 1
    name: str | None = None
    tags: frozenset[str] = frozenset()
    by_reference: bool = False


@dataclass(slots=True)
class Keeper:
    """Records calls of one gripped function.

    filled : called with this object when enough calls are recorded
    """

    function: FunctionType
    owner: type | None
    entry: str
    keep: Keep
    filled: Callable[[Keeper], None]
    calls: list[GrippedCall] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    _tags: set[str] = field(default_factory=set)
    _calls_by_signature: Counter[Hashable] = field(default_factory=Counter)
    _going: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pid: int = field(default_factory=os.getpid)

    @property
    def name(self) -> str:
        name = self.keep.name or self.entry.rpartition(f"{LOCALS}.")[2].replace(".", "_")
        return name if name.isidentifier() else _bound_name(self.function)

    def has_room(self) -> bool:
        return len(self.calls) + self._going < self.keep.calls

    def gripped(self) -> Gripped:
        owner = self.owner or owner_of(self.function, self.entry)
        tags = frozenset(self._tags) | self.keep.tags
        calls = tuple(self.calls)
        return Gripped(self.function, owner, self.entry, self.name, tags, calls, self.keep.by_reference)

    def run(self, arguments: SpecTree, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Run a call, record it if it is needed, and return its result."""
        try:
            before = self._begin(arguments)
        except Exception as error:
            raise_if_from_program(error)
            self._count_loss(one_line(error))
            before = None
        if before is None:
            return call()
        running = Running()
        spent_before, start = spent.ns, perf_counter_ns()
        try:
            with running:
                result = call()
        except BaseException as error:
            self._end(before, one_line(error))
            raise
        duration = perf_counter_ns() - start - (spent.ns - spent_before)
        reason: str | None = None
        try:
            with own_work(), isolate_from_program():
                self._keep(before, running, duration, args, kwargs, result)
        except CannotHold as error:
            reason = str(error)
        except BaseException as error:
            reason = one_line(error)
            if is_from_program(error):
                self._end(before, reason)
                raise
        self._end(before, reason)
        return result

    def _begin(self, arguments: SpecTree) -> _Before | None:
        if not self.has_room() or os.getpid() != self._pid:
            return None
        key = call_key(self.entry, *arguments.tree)
        with self._lock:
            if not self.has_room() or self._calls_by_signature[key] >= self.keep.per_signature:
                return None
            self._calls_by_signature[key] += 1
            self._going += 1
        try:
            settings = describe_context(read_context()) | {"autocast": describe_autocast()}
            with own_work(), isolate_from_program():
                if _has_only_empty_tensors(arguments.tree):
                    # as of a detector without detections; later calls may have data
                    raise CannotHold("its calls have only empty tensors")
                return _Before(arguments.names, _copy_within_limit(arguments), _random_states(), settings)
        except BaseException as error:
            self._going -= 1
            if isinstance(error, CannotHold):
                self._count_loss(str(error))
                return None
            raise

    def _keep(
        self,
        before: _Before,
        running: Running,
        duration_ns: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        has_drawn = _has_drawn(before.random_states)
        args_after = take((args, kwargs))
        after = None if alike(before.tree, args_after.tree) else _make_copy(args_after)
        results = _make_copy(take(result))
        made_args, made_kwargs = make_arguments(before.tree, before.names)
        random_state = before.random_states.cpu if has_drawn else None
        call = GrippedCall(
            args=made_args,
            kwargs=made_kwargs,
            results=results,
            after=after,
            random_state=random_state,
            operators=running.operators,
            operator_ns=running.operator_ns,
            duration_ns=duration_ns,
            settings=before.settings,
        )
        self._tags |= running.tags | ({RANDOM} if has_drawn else set())
        self.calls.append(call)

    def _end(self, before: _Before, reason: str | None) -> None:
        with self._lock:
            self._going -= 1
        if reason is not None:
            self._count_loss(reason)
        elif len(self.calls) == self.keep.calls:
            self.filled(self)

    def _count_loss(self, reason: str) -> None:
        self.lost[reason] += 1


def _bound_name(function: FunctionType) -> str:
    for name, value in list(function.__globals__.items()):
        if value is function or (type(value) is FunctionType and getattr(value, "__wrapped__", None) is function):
            return name
    return "unnamed"


def owner_of(function: FunctionType, entry: str) -> type | None:
    scope: Any = function.__globals__
    for part in entry.split(".")[:-1]:
        scope = (scope if isinstance(scope, dict) else vars(scope)).get(part)
        if not isinstance(scope, type):
            return None
    return scope if isinstance(scope, type) else None


@dataclass(frozen=True, slots=True)
class _RandomStates:
    cpu: Tensor
    device: Tensor | None
    others: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Before:
    names: Mapping[str, Any]
    tree: Any
    random_states: _RandomStates
    settings: dict[str, Any]


def _copy_within_limit(spec_tree: SpecTree) -> Any:
    if spec_tree.refused is not None:
        raise CannotHold(f"it takes or returns {spec_tree.refused}")
    size = bytes_of(spec_tree.tree)
    if size > MOST_BYTES:
        raise CannotHold(f"its tensors are {size / 1e9:,.1f} GB, more than {MOST_BYTES / 1e9:,.1f} GB")
    return copy_tensors(spec_tree.tree)


def _has_only_empty_tensors(tree: Any) -> bool:
    # tensors inside objects, such as a module's parameters, do not count
    tensors: list[Tensor] = []
    waiting = [tree]
    while waiting:
        item = waiting.pop()
        if isinstance(item, SharedSpec):
            item = item.value
        if isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, tuple | list):
            waiting.extend(item)
        elif isinstance(item, dict):
            waiting.extend(item.values())
    return bool(tensors) and not any(tensor.numel() for tensor in tensors)


def _make_copy(spec_tree: SpecTree) -> Any:
    return make_arguments(_copy_within_limit(spec_tree), spec_tree.names)


def _random_states() -> _RandomStates:
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    numpy: Any = np.random.get_state()
    return _RandomStates(torch.get_rng_state(), device, (random.getstate(), numpy[1].tobytes(), *numpy[2:]))


def _has_drawn(before: _RandomStates) -> bool:
    now = _random_states()
    if now.others != before.others:
        raise CannotHold("it draws random numbers with a generator other than torch's")
    if before.device is not None and now.device is not None and not torch.equal(before.device, now.device):
        raise CannotHold("it draws random numbers on an accelerator")
    return not torch.equal(before.cpu, now.cpu)
