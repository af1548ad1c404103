"""Observation of a gripped call: number and time of its operators, and tags of the sample that follow from them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from types import FunctionType
from typing import Any, cast

import torch

from opgrip.capture.torch_compat.compiler_private import (
    OrderlyMode,
    hide_from_compiler,
    leave_compiled,
    see_higher_order,
)
from opgrip.errors import raise_if_from_program

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
    """Exclude operators that this thread calls inside the block from observation."""
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
    """Return True if this thread is inside an `own_work` block."""
    return getattr(_own, "busy", False)


class Running(OrderlyMode):
    """Dispatch mode that counts and times the operators of a block, below autograd and autocast.

    operators, operator_ns : number and total time of the operators
    """

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

    _hidden = hide_from_compiler(cast(FunctionType, __torch_dispatch__))

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            shapes = tuple((tuple(item.shape), item.dtype in _MASKS) for item in _tensors((*args, *kwargs.values())))
            key = (func, shapes)
            if key not in self._tags_by_call:
                self._tags_by_call[key] = frozenset(tags_of(func, shapes))
        except Exception as error:
            raise_if_from_program(error)
            # an operator whose tags cannot be found must not disturb the program
            self._tags_by_call.setdefault((func,), frozenset())


leave_compiled(Running)


def tags_of(func: Any, shapes: Sequence[tuple[tuple[int, ...], bool]]) -> Iterator[str]:
    """Yield the tags, such as `Reduce`, of a function that called an operator.

    shapes : for each tensor in the arguments, its shape, and True if its dtype is that of a mask
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


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
