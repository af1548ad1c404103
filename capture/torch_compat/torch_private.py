"""Private interfaces of torch that the capture package uses, which may change between versions."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import count
from types import FunctionType
from typing import Any

import numpy as np
import torch

from opgrip.errors import raise_if_from_program
from opgrip.platform.private_apis import PrivatePlaces

Check = Callable[[Any], bool]

_places = PrivatePlaces()
private_places = _places.report
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SINGLETONS = (type(None), bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


# returns the node that autograd is running in this thread, or None outside a backward pass
current_autograd_node: Callable[[], Any] = _places.take(
    "torch._C._current_autograd_node", lambda: None, "calls of a backward pass are recorded as forward ones"
)

# returns a number of the backward pass that runs in this thread, also where no node runs; negative outside all
backward_pass: Callable[[], int] = _places.take(
    "torch._C._current_graph_task_id",
    lambda: -1 if current_autograd_node() is None else 0,
    "backward passes without nodes, as of torch.distributed.autograd, are recorded as forward ones",
)

sequence_number: Callable[[], int] = _places.take(
    "torch._C._autograd._get_sequence_nr", lambda: 0, "calls of a backward pass do not refer to forward calls"
)

# returns the device type of a third-party backend
out_of_tree_device: Callable[[], str] = _places.take(
    "torch._C._get_privateuse1_backend_name", lambda: "privateuseone", "accelerators of other packages have no times"
)

NO_SEQUENCE = (1 << 64) - 1  # sequence number of autograd nodes that accumulate gradients, which no operator created


def _storage_address(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


# returns the address of a tensor's storage object, the same for all tensors in the same memory
storage_address: Callable[[torch.Tensor], int] = _places.take(
    "torch._C._storage_address", _storage_address, "a Python object of the storage is created to read its address"
)

_NEVER_ABSENT = "captures cannot begin"

# returns the address of a storage object and reserves it until `unpin`, without keeping the memory alive
pin: Callable[[torch.UntypedStorage], int] = _places.take("torch.UntypedStorage._weak_ref", None, _NEVER_ABSENT)

# releases an address reserved by `pin`; call it once for each call of `pin`
unpin: Callable[[int], None] = _places.take("torch.UntypedStorage._free_weak_ref", None, _NEVER_ABSENT)

storage_is_gone: Callable[[int], bool] = _places.take("torch.UntypedStorage._expired", None, _NEVER_ABSENT)


def is_made_of_tensors(kind: type) -> bool:
    """Return True if a tensor class runs its operators on inner tensors, as nested and distributed tensors do."""
    return hasattr(kind, "__tensor_flatten__") and kind.__name__ != "FunctionalTensor"


def is_fake(kind: type) -> bool:
    # the class is known by name, because its module takes a second to import
    return kind.__name__ == "FakeTensor"


_infra_mode = _places.take(
    "torch._C._get_dispatch_mode", None, "calls under a FakeTensorMode are recognized by their results"
)
_mode_keys = _places.take("torch._C._TorchDispatchModeKey", None, "as for torch._C._get_dispatch_mode")


def is_faking() -> bool:
    """Return True if a FakeTensorMode of the program handles this thread's calls."""
    return _infra_mode is not None and _infra_mode(_mode_keys.FAKE) is not None


def is_plain(kind: type) -> bool:
    """Return True if a tensor class does not override `__torch_dispatch__`."""
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


# returns a context in which tensor operations run outside all dispatch modes. One in Python could be
# interrupted between its start and its block, and the thread would then stay without modes
without_modes: Callable[[], AbstractContextManager[Any]] = _places.take(
    "torch._C._DisableTorchDispatch", nullcontext, "dispatch modes of the program see the work of the capture"
)
# returns a context in which tensor operations run without the `__torch_function__` of subclasses
without_functions: Callable[[], AbstractContextManager[Any]] = _places.take(
    "torch._C.DisableTorchFunction", nullcontext, "tensor subclasses of the program see the work of the capture"
)


_has_kernel: Callable[[str, str], bool] = _places.take(
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    lambda name, key: True,
    "results that are views are recognized by their memory",
)


def is_composite(func: Any) -> bool:
    """Return True if an operator only calls others, or if this version of torch does not report this."""
    return _has_kernel(func.name(), "CompositeImplicitAutograd")


_takes_numbers: Callable[[str], bool] = _places.take(
    "torch._C._should_allow_numbers_as_tensors", lambda name: True, "reading graphs of TorchScript fails in a capture"
)


@cache
def _tensors_only(func: Any) -> tuple[int, ...]:
    schema = getattr(func, "_schema", None)
    if schema is None or _takes_numbers(schema.name.partition("::")[2]):
        return ()
    return tuple(place for place, argument in enumerate(schema.arguments) if str(argument.type) == "Tensor")


def with_tensors(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Undo what torch does to tensors that TorchScript made of numbers: a mode gets numbers, which `func` refuses."""
    numbers = (place for place, value in enumerate(args) if isinstance(value, int | float | complex))
    places = [place for place in numbers if place in _tensors_only(func)]
    if not places:
        return args
    changed = list(args)
    with without_modes(), without_functions():
        for place in places:
            changed[place] = torch.from_numpy(np.asarray(args[place]))
    return changed


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
    """Return a function that compares the metadata and scalars of other arguments with those of `args`."""
    return _compiled_check(lambda root: _add_items(root, root.tuple_getitem_manager, args, typed_lists), tuple(args))


def keywords_check(kwargs: Mapping[str, Any]) -> Check | None:
    """Return a function that compares the metadata and scalars of other keyword arguments with those of `kwargs`."""

    def add(root: Any) -> bool:
        root.add_dict_length_check_guard(len(kwargs), *_place_in_code())
        child_of = lambda name: root.dict_getitem_manager(name, name, kwargs[name], _plain_manager())  # noqa: E731
        return all(_add_value(child_of(name), value, False) for name, value in kwargs.items())

    return _compiled_check(add, kwargs)


def _compiled_check(add: Callable[[Any], bool], values: Any) -> Check | None:
    if _root_guard is None:
        return None
    try:
        root = _root_guard()
        check: Check = root.check
        return check if add(root) and check(values) else None
    except Exception as error:
        raise_if_from_program(error)
        # the guards of another version of torch may take other arguments
        return None


_places.declare(
    "compiled tests of arguments",
    lambda: arguments_check((torch.ones(1), [1], 0.0)) is not None and keywords_check({"dim": 0}) is not None,
    "as for RootGuardManager",
)


def load_private() -> None:
    if _root_guard is not None:
        _plain_manager()


# number of calls that would get a test before the module for them is imported, which takes a second
UNTESTED = 100
_untested = count()


def can_test() -> bool:
    """Return True if a test can be made of a call that recurs; a short program ends before it needs one."""
    if "torch._dynamo" not in sys.modules:
        if next(_untested) < UNTESTED:
            return False
        try:
            # its import calls operators
            with without_modes():
                load_private()
        except Exception as error:
            raise_if_from_program(error)
    return hasattr(sys.modules.get("torch._dynamo"), "reset")


def _plain_manager() -> Any:
    return getattr(_guard_kinds(), "GUARD_MANAGER", None)


@cache
def _place_in_code() -> tuple[Any, ...]:
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
    if isinstance(value, torch.Tensor):
        return is_plain(kind) and _add_tensor(manager, value)
    if kind in _SINGLETONS:
        manager.add_equals_match_guard(value, *_place_in_code())
    elif kind is float:
        if math.isnan(value):
            return False
        manager.add_equals_match_guard(value, *_place_in_code())
        if value == 0:
            # use a function in C: torch swallows an exception that interrupts a Python function here
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
    if _offset_guard is None and type(tensor) not in _PLAIN:
        # the function in Python would call the `__torch_function__` of the class
        return False
    shape, stride, where = list(tensor.shape), list(tensor.stride()), _place_in_code()
    try:
        manager.add_tensor_match_guard(tensor, shape, stride, "", *where, type(tensor), _dispatch_keys(tensor))
    except TypeError:
        # torch 2.6 reads class and keys from the tensor
        manager.add_tensor_match_guard(tensor, shape, stride, "", *where)
    offset = tensor.storage_offset()
    if _offset_guard is None:
        manager.add_lambda_guard(lambda other: other.storage_offset() == offset, *where)
    else:
        of_offset = manager.tensor_property_storage_offset_manager(None, "", offset, _plain_manager())
        of_offset.add_equals_match_guard(offset, *where)
    return True


is_transformed: Callable[[torch.Tensor], bool] = _places.take(
    "torch._C._functorch.is_functorch_wrapped_tensor", lambda tensor: False, "calls inside vmap are kept like others"
)
_transforms = _places.take(
    "torch._C._functorch.peek_interpreter_stack", lambda: None, "calls inside vmap are kept like others"
)
# torch's public function for this emits a warning
_is_traced_by_fx = _places.take(
    "torch.fx._symbolic_trace._get_is_fx_tracing",
    lambda: bool(getattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", False)),
    "a flag of older versions is read instead",
)


def is_transforming() -> bool:
    """Return True if this thread runs inside a transform of torch.func or is traced by torch.fx."""
    return bool(_is_traced_by_fx()) or _transforms() is not None


def _has_reduction_numbers() -> bool:
    try:
        return hasattr(torch.classes.c10d.ReduceOp(), "op")
    except RuntimeError:
        # torch is built without collectives
        return False


_places.declare(
    "torch.classes.c10d.ReduceOp.op", _has_reduction_numbers, "the reduction of a collective is not recorded"
)


def reduction_number(reduction: Any) -> int | None:
    return int(reduction.op()) if hasattr(reduction, "op") else None


_resolve_group = _places.take_later(
    "torch.distributed.distributed_c10d._resolve_process_group",
    None,
    "the group of a functional collective is recorded only by name",
)


def group_of_name(name: str) -> Any:
    resolve = _resolve_group()
    if resolve is None:
        return None
    try:
        return resolve(name)
    except (RuntimeError, ValueError, KeyError):
        return None


# returns the dispatch mode that sees the calls of this thread first
innermost_mode: Callable[[], Any] = _places.take(
    "torch.utils._python_dispatch._get_current_dispatch_mode",
    lambda: None,
    "a step may end while a dispatch mode of the program is still active",
)


_wrapped_call = _places.take("torch.nn.Module._wrapped_call_impl", None, "running calls are recognized by `_call_impl`")
_call = _places.take("torch.nn.Module._call_impl", None, "one running step may be recorded as several")
# code objects of the functions that run while a module is called
MODULE_CALLS = frozenset(function.__code__ for function in (_wrapped_call, _call) if function is not None)


def _queries(**names: str) -> dict[str, Callable[..., Any]]:
    functions = {
        use: _places.take(f"torch._C.{name}", None, "torch's public functions are called")
        for use, name in names.items()
    }
    return {use: function for use, function in functions.items() if function is not None}


_STREAM_QUERIES = {
    "cuda": _queries(
        is_capturing="_cuda_isCurrentStreamCapturing",
        current_device="_cuda_getDevice",
        stream_handle="_cuda_getCurrentRawStream",
    ),
    "xpu": _queries(current_device="_xpu_getDevice", stream_handle="_xpu_getCurrentRawStream"),
}
_CURRENT_DEVICE = _queries(current_device="_accelerator_getDeviceIndex")


def stream_queries(kind: str) -> dict[str, Callable[..., Any]]:
    if kind in _STREAM_QUERIES:
        return _STREAM_QUERIES[kind]
    return _CURRENT_DEVICE if kind == out_of_tree_device() else {}


def _profiler_entries(**names: str) -> tuple[tuple[Any, str], ...]:
    fallback = "a program whose kernels are timed cannot profile itself"
    return tuple(
        (sys.modules[f"torch.autograd.{module}"], name)
        for name, module in names.items()
        if _places.take(f"torch.autograd.{module}.{name}", None, fallback) is not None
    )


# functions, as owner and name, of which every profile (and `emit_nvtx`) calls one first
PREPARE_PROFILER = _profiler_entries(_prepare_profiler="profiler", _enable_profiler="profiler")

_fast_label = _places.take("torch._C._profiler._RecordFunctionFast", None, "fast labels are not recorded")
HAS_FAST_LABELS = _fast_label is not None

_definitions: Mapping[str, Any] = _places.take(
    "torch._library.custom_ops.OPDEFS",
    {},
    "traces do not say which module registered an operator that is defined in Python",
)
_describe_registration: Callable[[str], str] = _places.take(
    "torch._C._dispatch_dump",
    lambda name: "",
    "traces do not say which file registered an operator that is defined in a library",
)
_REGISTERED_AT = re.compile(r"^(?:debug|schema): .*registered at (.+\.py):\d+", re.MULTILINE)
_MAIN = ("__main__", "__mp_main__")


def registered_by(name: Hashable) -> str | None:
    try:
        if isinstance(name, str):
            module: str | None = name.partition(":")[0]
            return _main() if module in _MAIN else None
        operator: Any = name
        schema = getattr(operator, "_schema", None)
        if schema is None or operator.namespace in ("aten", "prims", "profiler"):
            return None
        definition = _definitions.get(schema.name)
        module = _module_of_file(operator.name()) if definition is None else _module_of(definition._init_fn)
        if module in _MAIN:
            return _main()
        module = module or _library_called(operator.namespace)
        return None if module is None or _is_torch(module) else module
    except Exception as error:
        raise_if_from_program(error)
        return None


def _module_of(function: Any) -> str:
    cells = getattr(function, "__closure__", None) or ()
    functions = [function, *(cell.cell_contents for cell in cells if isinstance(cell.cell_contents, FunctionType))]
    modules = [str(item.__module__) for item in functions]
    return next((module for module in modules if not _is_torch(module)), modules[0])


def _is_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def _main() -> str | None:
    main = vars(sys.modules["__main__"])
    spec, file = main.get("__spec__"), main.get("__file__")
    if spec is not None:
        return str(spec.name)
    return None if file is None else os.path.abspath(file)


def _files() -> dict[str, str]:
    modules = [(name, getattr(module, "__dict__", {})) for name, module in list(sys.modules.items())]
    return {str(names["__file__"]): name for name, names in modules if names.get("__file__")}


def _module_of_file(operator: str) -> str | None:
    place = _REGISTERED_AT.search(_describe_registration(operator))
    return None if place is None else _files().get(place[1])


def _library_called(namespace: str) -> str | None:
    for file, name in _files().items():
        if name.rpartition(".")[2] == namespace and file.endswith(tuple(EXTENSION_SUFFIXES)):
            return name
    libraries = list(torch.ops.loaded_libraries)
    return libraries[0] if len(libraries) == 1 else None
