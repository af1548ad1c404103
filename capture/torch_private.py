"""All that capture takes from torch's private interfaces, which may change from version to version.

Seen in torch 2.13; a name that another version lacks is replaced by what comes nearest, or by nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any, cast

import torch

Check = Callable[[Any], bool]

_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SINGLETONS = (type(None), bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _no_node() -> None:
    return None


def _no_number() -> int:
    return 0


current_autograd_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", _no_node)
"""The node that the autograd engine runs in this thread; None outside a backward pass."""

sequence_number: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", _no_number)
"""How many nodes of autograd this thread has made."""

NO_SEQUENCE = (1 << 64) - 1
"""What nodes that no operator made, those that accumulate gradients, have for a number."""


def _storage_address(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


storage_address: Callable[[torch.Tensor], int] = getattr(torch._C, "_storage_address", _storage_address)
"""The address of a tensor's storage object: the same for all tensors that live in the same memory."""


pin = cast(Callable[[torch.UntypedStorage], int], torch.UntypedStorage._weak_ref)
"""The address of a storage object, which no other gets until `unpin`. Keeps no memory alive."""

unpin: Callable[[int], None] = torch.UntypedStorage._free_weak_ref
"""Give back an address that `pin` gave, as often as it did."""

storage_is_gone = cast(Callable[[int], bool], torch.UntypedStorage._expired)
"""Whether the storage of a pinned address has been freed."""


def is_made_of_tensors(kind: type) -> bool:
    """Whether a class of tensors runs its operators on tensors that it holds, as nested and distributed ones do."""
    return hasattr(kind, "__tensor_flatten__") and kind.__name__ != "FunctionalTensor"


def hide_from_compiler(function: FunctionType) -> bool:
    """Keep torch.compile from tracing a function and all that it calls; False where this torch has no means to.

    What a dispatch mode runs inside a compiled region is else compiled with it. torch's own means, a guard around the
    mode's handler, does the same at each call, for half the cost of an empty mode.
    """
    frames = torch._C._dynamo.eval_frame
    try:
        skip = frames._FrameAction.SKIP
        strategy = frames._FrameExecStrategy(skip, skip)
        frames.set_code_exec_strategy(function.__code__, strategy)
    except (AttributeError, TypeError):
        return False
    return True


@contextmanager
def unobserved() -> Iterator[None]:
    """Let the tensor operations of the block pass by every mode and subclass, ours and the program's."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


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
    if _guards is None:
        return None
    try:
        root = _guards.RootGuardManager()
        if not _add_items(root, root.tuple_getitem_manager, args, typed_lists):
            return None
        check: Check = root.check
        return check if check(tuple(args)) else None
    except Exception:
        # another version's guards take other arguments
        return None


def keywords_check(kwargs: Mapping[str, Any]) -> Check | None:
    """The same for keyword arguments; its function takes the dictionary."""
    if _guards is None:
        return None
    try:
        root = _guards.RootGuardManager()
        root.add_dict_length_check_guard(len(kwargs), [""], None)
        for name, value in kwargs.items():
            child = root.dict_getitem_manager(name, name, value, _plain_manager())
            if not _add_value(child, value, False):
                return None
        check: Check = root.check
        return check if check(kwargs) else None
    except Exception:
        return None


def load_private() -> None:
    """Import what the tests need, which takes torch a second, before a program is watched."""
    if _guards is not None:
        with suppress(ImportError):
            _plain_manager()


def _plain_manager() -> Any:
    from torch._dynamo.guards import GuardManagerType

    return GuardManagerType.GUARD_MANAGER


def _add_items(manager: Any, child_at: Callable[..., Any], items: Sequence[Any], typed_lists: bool) -> bool:
    manager.add_length_check_guard(len(items), [""], None)
    kind = _plain_manager()
    return all(
        _add_value(child_at(place, str(place), item, kind), item, typed_lists) for place, item in enumerate(items)
    )


def _add_value(manager: Any, value: Any, typed_lists: bool) -> bool:
    kind = type(value)
    if kind in _PLAIN:
        return _add_tensor(manager, value)
    if kind in _SINGLETONS:
        manager.add_equals_match_guard(value, [""], None)
    elif kind is float:
        if math.isnan(value):
            return False
        manager.add_equals_match_guard(value, [""], None)
        if value == 0:
            sign = math.copysign(1.0, value)
            manager.add_lambda_guard(lambda other: math.copysign(1.0, other) == sign, [""], None)
    elif kind is list and typed_lists and all(type(item) is int for item in value):
        manager.add_equals_match_guard(value, [""], None)
    elif kind is list or kind is tuple:
        manager.add_type_match_guard(id(kind), [""], None)
        child_at = manager.list_getitem_manager if kind is list else manager.tuple_getitem_manager
        return _add_items(manager, child_at, value, typed_lists)
    else:
        return False
    return True


def _add_tensor(manager: Any, tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    shape, stride, keys = list(tensor.shape), list(tensor.stride()), torch._C._dispatch_keys(tensor)
    manager.add_tensor_match_guard(tensor, shape, stride, "", [""], None, type(tensor), keys)
    offset = tensor.storage_offset()
    property_of = manager.tensor_property_storage_offset_manager
    property_of(None, "", offset, _plain_manager()).add_equals_match_guard(offset, [""], None)
    return True


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a transform of torch.func, such as vmap, stands around a tensor's values."""
    found = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", None)
    return found is not None and bool(found(tensor))


def is_transforming() -> bool:
    """Whether this thread runs inside a transform of torch.func, or is traced by torch.fx."""
    stack = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
    # torch's own function that tells warns of what it tells
    traced = getattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", False)
    return bool(traced) or (stack is not None and stack() is not None)
