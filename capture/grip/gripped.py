"""A gripped function and its recorded calls."""

from __future__ import annotations

import functools
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
from opgrip.capture.grip.patterns import LOCALS, GripTarget
from opgrip.capture.program.capture_choices import CALLS
from opgrip.capture.program.environment import describe_autocast, describe_context, read_context
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.signatures.signatures import call_key, tensors_in
from opgrip.capture.torch_compat.compiler_private import (
    OrderlyMode,
    hide_from_compiler,
    leave_compiled,
    see_higher_order,
)
from opgrip.capture.torch_compat.torch_private import is_transforming
from opgrip.errors import is_from_program, one_line, raise_if_from_program
from opgrip.platform import perf_counter_ns
from opgrip.traces.rebuild import make_arguments
from opgrip.traces.schema.python_objects import SharedSpec
from opgrip.traces.schema.records import FUNCTION

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


KEEP = Keep()


class GrippedFunction:
    """A function of the program, whose calls are recorded in a trace, kept for a sample, or both.

    keep : calls to keep for a sample; None to keep none
    filled : called with this object when enough calls are kept
    function : the function that the sample is made of; an inner function is a new object whenever the outer one runs,
        and only the newest one is `wrapped` by `wrapper`
    """

    def __init__(
        self,
        target: GripTarget,
        keep: Keep | None,
        recorder: Recorder | None,
        filled: Callable[[GrippedFunction], None],
    ) -> None:
        self.function, self.owner, self.entry = target.function, target.owner, target.qualname
        self.active, self.called, self.written = True, False, False
        self.calls: list[GrippedCall] = []
        self.lost: Counter[str] = Counter()
        self._keep, self._recorder, self._filled = keep, recorder, filled
        self._trace_name = f"{target.function.__module__}:{target.qualname}"
        self._tags: set[str] = set()
        self._calls_by_signature: Counter[Hashable] = Counter()
        self._going = 0
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.wrap(target.function)

    def wrap(self, function: FunctionType) -> None:
        @functools.wraps(function)
        def gripped(*args: Any, **kwargs: Any) -> Any:
            # torch does not execute a call that it traces or compiles
            is_traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or is_transforming()
            if is_traced or not self.active:
                return function(*args, **kwargs)
            return self._call(function, args, kwargs)

        # torch.jit compiles the source of its argument, and this wrapper's source is not the function's
        gripped.__prepare_scriptable__ = lambda: function  # type: ignore[attr-defined]
        self.wrapped, self.wrapper = function, cast(FunctionType, gripped)

    def has_room(self) -> bool:
        return self._keep is not None and len(self.calls) + self._going < self._keep.calls

    def gripped(self) -> Gripped:
        assert self._keep is not None
        owner = self.owner or owner_of(self.function, self.entry)
        name = self._keep.name or self.entry.rpartition(f"{LOCALS}.")[2].replace(".", "_")
        if not name.isidentifier():
            name = _bound_name(self.function)
        tags = frozenset(self._tags) | self._keep.tags
        return Gripped(self.function, owner, self.entry, name, tags, tuple(self.calls), self._keep.by_reference)

    def _call(self, function: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.called = True
        recorder = self._recorder
        if at_own_work() or (recorder is None and not self.has_room()):
            return function(*args, **kwargs)
        if recorder is not None and (recorder.at_own_work() or recorder.threads.idle):
            return function(*args, **kwargs)
        try:
            with own_work(), isolate_from_program():
                arguments = take((args, kwargs))
        except Exception as error:
            raise_if_from_program(error)
            if self._keep is not None:
                self.lost[one_line(error)] += 1
            if recorder is not None:
                recorder.lost.drop(self._trace_name, error)
            return function(*args, **kwargs)

        def run() -> Any:
            if self._keep is None:
                return function(*args, **kwargs)
            return self._run(arguments, function, args, kwargs)

        if recorder is None:
            return run()
        positional, named = arguments.tree
        return recorder.threads.here().call(self._trace_name, FUNCTION, run, positional, named, _describe_result)

    def _run(self, arguments: SpecTree, function: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            before = self._begin(arguments)
        except Exception as error:
            raise_if_from_program(error)
            self.lost[one_line(error)] += 1
            before = None
        if before is None:
            return function(*args, **kwargs)
        running = Running()
        spent_before, start = spent.ns, perf_counter_ns()
        try:
            with running:
                result = function(*args, **kwargs)
        except BaseException as error:
            self._end(one_line(error))
            raise
        duration = perf_counter_ns() - start - (spent.ns - spent_before)
        reason: str | None = None
        try:
            with own_work(), isolate_from_program():
                self._add(before, running, duration, args, kwargs, result)
        except CannotHold as error:
            reason = str(error)
        except BaseException as error:
            reason = one_line(error)
            if is_from_program(error):
                self._end(reason)
                raise
        self._end(reason)
        return result

    def _begin(self, arguments: SpecTree) -> _Before | None:
        assert self._keep is not None
        if not self.has_room() or os.getpid() != self._pid:
            return None
        key = call_key(self.entry, *arguments.tree)
        with self._lock:
            if not self.has_room() or self._calls_by_signature[key] >= self._keep.per_signature:
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
                self.lost[str(error)] += 1
                return None
            raise

    def _add(
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
        call = GrippedCall(
            args=made_args,
            kwargs=made_kwargs,
            results=results,
            after=after,
            random_state=before.random_states.cpu if has_drawn else None,
            operators=running.operators,
            operator_ns=running.operator_ns,
            duration_ns=duration_ns,
            settings=before.settings,
        )
        self._tags |= running.tags | ({RANDOM} if has_drawn else set())
        self.calls.append(call)

    def _end(self, reason: str | None) -> None:
        assert self._keep is not None
        with self._lock:
            self._going -= 1
        if reason is not None:
            self.lost[reason] += 1
        elif len(self.calls) == self._keep.calls:
            self._filled(self)


def _describe_result(result: Any) -> Any:
    with own_work(), isolate_from_program():
        return take(result).tree


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
