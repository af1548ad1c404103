"""All that capture takes from torch's private interfaces, which may change from version to version.

Seen in torch 2.6, 2.13 and 2.15; a place that another version lacks is replaced by what is declared beside it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from opgrip.errors import raise_if_from_program
from opgrip.platform.private_apis import PrivatePlaces

Check = Callable[[Any], bool]

_places = PrivatePlaces()
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SINGLETONS = (type(None), bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def private_places() -> dict[str, str]:
    """For each private place of torch that capture uses `found`, or what it does instead where this torch lacks it."""
    return _places.report()


current_autograd_node: Callable[[], Any] = _places.take(
    "torch._C._current_autograd_node", lambda: None, "calls of a backward pass are recorded as forward ones"
)
"""The node that the autograd engine runs in this thread; None outside a backward pass."""

sequence_number: Callable[[], int] = _places.take(
    "torch._C._autograd._get_sequence_nr", lambda: 0, "calls of a backward pass have no pair in the forward one"
)
"""How many nodes of autograd this thread has made."""

out_of_tree_device: Callable[[], str] = _places.take(
    "torch._C._get_privateuse1_backend_name", lambda: "privateuseone", "accelerators of other packages have no times"
)
"""The type of the devices that a package outside of torch brings."""

NO_SEQUENCE = (1 << 64) - 1
"""What nodes that no operator made, those that accumulate gradients, have for a number."""


def _storage_address(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


storage_address: Callable[[torch.Tensor], int] = _places.take(
    "torch._C._storage_address", _storage_address, "a Python object of the storage is made to tell its address"
)
"""The address of a tensor's storage object: the same for all tensors that live in the same memory."""

_NEVER_ABSENT = "none: no capture begins"

pin: Callable[[torch.UntypedStorage], int] = _places.take("torch.UntypedStorage._weak_ref", None, _NEVER_ABSENT)
"""The address of a storage object, which no other gets until `unpin`. Keeps no memory alive."""

unpin: Callable[[int], None] = _places.take("torch.UntypedStorage._free_weak_ref", None, _NEVER_ABSENT)
"""Give back an address that `pin` gave, as often as it did."""

storage_is_gone: Callable[[int], bool] = _places.take("torch.UntypedStorage._expired", None, _NEVER_ABSENT)
"""Whether the storage of a pinned address has been freed."""


def is_made_of_tensors(kind: type) -> bool:
    """Whether a class of tensors runs its operators on tensors that it holds, as nested and distributed ones do."""
    return hasattr(kind, "__tensor_flatten__") and kind.__name__ != "FunctionalTensor"


without_modes: Callable[[], AbstractContextManager[Any]] = _places.take(
    "torch._C._DisableTorchDispatch", nullcontext, "modes of the program see our own work"
)
"""Let the tensor operations of a block pass by every mode, ours and the program's.

Written in C, as the next one is: a context manager in Python can be interrupted between entering it and its block, and
then leaves the thread without modes.
"""
without_functions: Callable[[], AbstractContextManager[Any]] = _places.take(
    "torch._C.DisableTorchFunction", nullcontext, "subclasses of the program see our own work"
)
"""Let the tensor operations of a block pass by every subclass of the program."""


_has_kernel: Callable[[str, str], bool] = _places.take(
    "torch._C._dispatch_has_kernel_for_dispatch_key", lambda name, key: True, "results that are views are looked up"
)


def is_composite(func: Any) -> bool:
    """Return True if an operator calls others and has no kernel of its own, or this torch does not tell."""
    return _has_kernel(func.name(), "CompositeImplicitAutograd")


_root_guard = _places.take(
    "torch._C._dynamo.guards.RootGuardManager", None, "calls are recognized by keys made in Python"
)
_guard_kinds = _places.take_later("torch._dynamo.guards.GuardManagerType", None, "as for RootGuardManager")
_offset_guard = _places.take(
    "torch._C._dynamo.guards.GuardManager.tensor_property_storage_offset_manager",
    None,
    "a function in Python compares the offsets of tensors",
)
_dispatch_keys = _places.take("torch._C._dispatch_keys", None, "as for RootGuardManager")


def arguments_check(args: Sequence[Any], typed_lists: bool = False) -> Check | None:
    """A compiled test of whether other arguments have the same metadata and scalars.

    It tells what a signature tells, but for memory that arguments share: class, dtype, device, layout, shape, stride,
    offset, `requires_grad`, conjugation and negation of tensors, type and value of all else. It never says yes where
    one of these differs. It may say no where all are the same, under another state of the dispatcher.

    Parameters
    ----------
    typed_lists : where one call has a list of whole numbers, all have; a cheaper test will do

    Returns
    -------
    A function of the arguments as a tuple; None where they have a kind that it cannot tell, or this torch has no such
    tests.
    """
    if _root_guard is None:
        return None
    try:
        root = _root_guard()
        if not _add_items(root, root.tuple_getitem_manager, args, typed_lists):
            return None
        check: Check = root.check
        return check if check(tuple(args)) else None
    except Exception as error:
        raise_if_from_program(error)
        # another version's guards take other arguments
        return None


def keywords_check(kwargs: Mapping[str, Any]) -> Check | None:
    """The same for keyword arguments; its function takes the dictionary."""
    if _root_guard is None:
        return None
    try:
        root = _root_guard()
        root.add_dict_length_check_guard(len(kwargs), *_place_in_code())
        for name, value in kwargs.items():
            child = root.dict_getitem_manager(name, name, value, _plain_manager())
            if not _add_value(child, value, False):
                return None
        check: Check = root.check
        return check if check(kwargs) else None
    except Exception as error:
        raise_if_from_program(error)
        return None


_places.declare(
    "compiled tests of arguments",
    lambda: arguments_check((torch.ones(1), [1], 0.0)) is not None and keywords_check({"dim": 0}) is not None,
    "as for RootGuardManager",
)


def load_private() -> None:
    """Import what the tests need, which takes torch a second, before a program is watched."""
    if _root_guard is not None:
        _plain_manager()


def _plain_manager() -> Any:
    return getattr(_guard_kinds(), "GUARD_MANAGER", None)


@cache
def _place_in_code() -> tuple[Any, ...]:
    """The place in a program's code that a guard names; before torch 2.9 or so, without the user's frames."""
    try:
        _root_guard().add_length_check_guard(0, [""], None)
    except TypeError:
        return ([""],)
    return [""], None


def _add_items(manager: Any, child_at: Callable[..., Any], items: Sequence[Any], typed_lists: bool) -> bool:
    manager.add_length_check_guard(len(items), *_place_in_code())
    kind = _plain_manager()
    return all(
        _add_value(child_at(place, str(place), item, kind), item, typed_lists) for place, item in enumerate(items)
    )


def _add_value(manager: Any, value: Any, typed_lists: bool) -> bool:
    kind = type(value)
    if kind in _PLAIN:
        return _add_tensor(manager, value)
    if kind in _SINGLETONS:
        manager.add_equals_match_guard(value, *_place_in_code())
    elif kind is float:
        if math.isnan(value):
            return False
        manager.add_equals_match_guard(value, *_place_in_code())
        if value == 0:
            # by a function in C: torch swallows an exception that interrupts one in Python there
            of_sign = manager.lambda_manager(float.hex, "", value.hex(), _plain_manager())
            of_sign.add_equals_match_guard(value.hex(), *_place_in_code())
    elif kind is list and typed_lists and all(type(item) is int for item in value):
        manager.add_equals_match_guard(value, *_place_in_code())
    elif kind is list or kind is tuple:
        manager.add_type_match_guard(id(kind), *_place_in_code())
        child_at = manager.list_getitem_manager if kind is list else manager.tuple_getitem_manager
        return _add_items(manager, child_at, value, typed_lists)
    else:
        return False
    return True


def _add_tensor(manager: Any, tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    shape, stride, where = list(tensor.shape), list(tensor.stride()), _place_in_code()
    try:
        manager.add_tensor_match_guard(tensor, shape, stride, "", *where, type(tensor), _dispatch_keys(tensor))
    except TypeError:
        # of torch 2.6, which reads them off the tensor
        manager.add_tensor_match_guard(tensor, shape, stride, "", *where)
    offset = tensor.storage_offset()
    if _offset_guard is None:
        manager.add_lambda_guard(lambda other: other.storage_offset() == offset, *where)
    else:
        of_offset = manager.tensor_property_storage_offset_manager(None, "", offset, _plain_manager())
        of_offset.add_equals_match_guard(offset, *where)
    return True


def _fx_flag() -> bool:
    return bool(getattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", False))


_is_transformed = _places.take(
    "torch._C._functorch.is_functorch_wrapped_tensor", lambda tensor: False, "calls inside vmap are kept like others"
)
_transforms = _places.take(
    "torch._C._functorch.peek_interpreter_stack", lambda: None, "calls inside vmap are kept like others"
)
# torch's own function that tells warns of what it tells
_is_traced_by_fx = _places.take(
    "torch.fx._symbolic_trace._get_is_fx_tracing", _fx_flag, "the flag of older versions, in the same module"
)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a transform of torch.func, such as vmap, stands around a tensor's values."""
    return bool(_is_transformed(tensor))


def is_transforming() -> bool:
    """Whether this thread runs inside a transform of torch.func, or is traced by torch.fx."""
    return bool(_is_traced_by_fx()) or _transforms() is not None


_events = _places.take("torch._C._autograd._ProfilerResult.events", None, "times of kernels are refused")


_prepare_profiler = _places.take(
    "torch.autograd.profiler._prepare_profiler", None, "a program whose kernels are timed cannot profile itself"
)
PREPARE_PROFILER = () if _prepare_profiler is None else ((sys.modules["torch.autograd.profiler"], "_prepare_profiler"),)
"""Where what every profile calls before it starts is looked up."""


class ActivityProfile:
    """torch's profiler with the records that accelerators keep of their work, and nothing of operators."""

    def __init__(self, activities: Collection[Any] | None = None) -> None:
        self._profile: Any = torch.profiler.profile(activities=activities or recorded_activities().values())

    def start(self) -> None:
        """Keep records from now on."""
        self._profile.start()

    def stop(self) -> list[Any]:
        """Wait for the accelerator; gives the events."""
        self._profile.stop()
        events: list[Any] = self._profile.profiler.kineto_results.events()
        return events


def recorded_activities() -> dict[str, Any]:
    """The profiler's activities by the type of their devices, of the accelerators here that keep records.

    A device from outside of torch is among those that the profiler supports whether it keeps any or not.
    """
    activities = [] if _events is None else torch.profiler.supported_activities()
    return {item.name.lower(): item for item in activities if item.name in ("CUDA", "XPU")}


_event = "torch._C._autograd._KinetoEvent"
_tells_kind = (
    _places.take(
        f"{_event}.activity_type", None, "records are told apart by their device: of the host, those of launches"
    )
    is not None
)
_LAUNCH = ("_runtime", "_driver")
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def is_launch(event: Any) -> bool:
    """Whether a profile's event is that the host gave an accelerator work."""
    if _tells_kind:
        return bool(event.activity_type().endswith(_LAUNCH))
    return bool(event.device_type().name == "CPU" and event.correlation_id() > 0)


def is_work(event: Any) -> bool:
    """Whether a profile's event is what an accelerator did: a kernel, a copy, a fill."""
    if _tells_kind:
        return bool(event.activity_type().endswith(_WORK))
    return bool(event.device_type().name != "CPU" and not event.is_user_annotation())


def _tells_reductions() -> bool:
    try:
        return hasattr(torch.classes.c10d.ReduceOp(), "op")
    except RuntimeError:
        # torch is built without collectives
        return False


_places.declare(
    "torch.classes.c10d.ReduceOp.op", _tells_reductions, "which reduction a collective does is not recorded"
)


def reduction_number(reduction: Any) -> int | None:
    """The number of a boxed reduction among torch's; None where this torch does not tell."""
    return int(reduction.op()) if hasattr(reduction, "op") else None


_resolve_group = _places.take_later(
    "torch.distributed.distributed_c10d._resolve_process_group",
    None,
    "the group of a functional collective is recorded by its name alone",
)


def group_of_name(name: str) -> Any:
    """The process group of a name; None where there is none, or this torch does not tell."""
    resolve = _resolve_group()
    if resolve is None:
        return None
    try:
        return resolve(name)
    except (RuntimeError, ValueError, KeyError):
        return None


_current_mode: Callable[[], Any] = _places.take(
    "torch.utils._python_dispatch._get_current_dispatch_mode", lambda: None, "steps are left whatever mode is on"
)


def innermost_mode() -> Any:
    """The dispatch mode of this thread that sees calls first; None where none is on, or this torch does not tell."""
    return _current_mode()


_sequence_of_group = _places.take(
    "torch.distributed.ProcessGroup._get_sequence_number_for_group",
    None,
    "ranks whose program does not tell its steps begin to record when they are asked",
)


def collectives_begun() -> int | None:
    """How many collectives this rank has begun in the group of all; None where there is none, or nobody counts."""
    distributed = sys.modules.get("torch.distributed")
    if _sequence_of_group is None or distributed is None or not distributed.is_initialized():
        return None
    try:
        return int(_sequence_of_group(distributed.group.WORLD))
    except (RuntimeError, ValueError, TypeError):
        return None


_wrapped_call = _places.take("torch.nn.Module._wrapped_call_impl", None, "calls under way are known by `_call_impl`")
_call = _places.take("torch.nn.Module._call_impl", None, "a step that is under way can be taken for several")
MODULE_CALLS = frozenset(function.__code__ for function in (_wrapped_call, _call) if function is not None)
"""The code that runs while a module is called."""
