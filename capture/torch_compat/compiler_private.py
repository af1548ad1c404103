"""Private interfaces of torch's compiler and of higher-order operators, such as `torch.cond`."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import FunctionType, TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.errors import raise_if_from_program
from opgrip.platform.private_apis import PrivatePlaces

_places = PrivatePlaces()
private_places = _places.report


_set_strategy = _places.take(
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    None,
    "modes run with torch's compiler disabled, if torch can do that",
)
_actions = _places.take("torch._C._dynamo.eval_frame._FrameAction", None, "as for set_code_exec_strategy")
_strategy_of = _places.take("torch._C._dynamo.eval_frame._FrameExecStrategy", None, "as for set_code_exec_strategy")


def hide_from_compiler(function: FunctionType) -> bool:
    """Keep torch.compile from tracing a function and everything that it calls; return False if that is not possible."""
    try:
        _set_strategy(function.__code__, _strategy_of(_actions.SKIP, _actions.SKIP))
    except (AttributeError, TypeError):
        return False
    return True


_MODES_MODULE = "torch.utils._python_dispatch"
_OF_COMPILED = "_is_in_any_mode_without_ignore_compile_internals"
_MODE_FLAGS = tuple(
    name
    for name in ("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode", _OF_COMPILED)
    if _places.take(f"{_MODES_MODULE}.{name}", None, "nothing is lost: this torch keeps no such flag") is not None
)


_flags_lock = threading.RLock()


_modes_here = _places.take(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    None,
    "a forked process counts the modes of its parent's other threads as its own",
)


def _renew_flags() -> None:
    # a thread that no longer exists may have held the lock
    global _flags_lock
    _flags_lock = threading.RLock()
    if OrderlyMode._entered and _modes_here is not None:
        OrderlyMode._count_entered(sum(isinstance(mode, OrderlyMode) for mode in _modes_here()))


os.register_at_fork(after_in_child=_renew_flags)


class OrderlyMode(TorchDispatchMode):
    """A dispatch mode that can be left in any order, and by several threads at once."""

    was_entered = False
    _entered = 0
    _flags_before: Mapping[str, bool] = {}

    def __enter__(self) -> Any:
        with _flags_lock:
            if not OrderlyMode._entered:
                OrderlyMode._flags_before = _flags()
            OrderlyMode._entered += 1
            self.was_entered = True
            return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _flags_lock:
            super().__exit__(kind, error, traceback)
            self.forget()

    @staticmethod
    def can_leave() -> bool:
        """Return False while a mode handles a call: torch then takes it from the stack, and puts it back later."""
        return _modes_here is None or any(isinstance(mode, OrderlyMode) for mode in _modes_here())

    def forget(self) -> None:
        """Count the mode as left, because its thread has ended."""
        with _flags_lock:
            OrderlyMode._count_entered(OrderlyMode._entered - 1)

    @staticmethod
    def _count_entered(count: int) -> None:
        OrderlyMode._entered = count
        if not count:
            _set_flags(OrderlyMode._flags_before)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True in a block of `modes_hidden_from_compiler`, where torch may compile although this mode is on."""
        return getattr(_hidden, "modes", False)


_hidden = threading.local()
_set_compiled_flag = _places.take(
    "torch._C._dynamo.guards.set_is_in_mode_without_ignore_compile_internals",
    lambda value: None,
    "nothing is lost: this torch keeps no such flag",
)


def _flags() -> dict[str, bool]:
    return {name: getattr(sys.modules[_MODES_MODULE], name) for name in _MODE_FLAGS}


def _set_flags(flags: Mapping[str, bool]) -> None:
    for name, value in flags.items():
        setattr(sys.modules[_MODES_MODULE], name, value)
    _set_compiled_flag(flags.get(_OF_COMPILED, False))


@contextmanager
def modes_hidden_from_compiler() -> Iterator[None]:
    """Let torch compile in the block as if the capture's modes were off; the compiled code runs under them."""
    with _flags_lock:
        flags, was_hidden = _flags(), getattr(_hidden, "modes", False)
        _set_flags(OrderlyMode._flags_before)
    _hidden.modes = True
    try:
        yield
    finally:
        _hidden.modes = was_hidden
        with _flags_lock:
            _set_flags(flags if OrderlyMode._entered else OrderlyMode._flags_before)


_runs_compiled_code = _places.take(
    "torch.utils._python_dispatch.TorchDispatchMode.ignore_compile_internals",
    None,
    "the capture's modes are declared as torch's own, and run with torch's compiler disabled",
)
_disable_dynamo = _places.take(
    "torch._disable_dynamo", lambda function: function, "the compiler may trace the capture's modes"
)
_skip_code = _places.take(
    "torch._C._dynamo.eval_frame.skip_code", lambda code: None, "nothing is lost: other versions do not need it"
)


def leave_compiled(mode: type[TorchDispatchMode]) -> None:
    if _runs_compiled_code is not None:
        return
    changed: Any = mode
    plain = changed.__torch_dispatch__
    hidden = _disable_dynamo(plain)

    def handle(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # hiding the handler imports the compiler, and that import calls operators
        is_loaded = hasattr(sys.modules.get("torch._dynamo"), "disable")
        return (hidden if is_loaded else plain)(self, func, types, args, kwargs)

    _skip_code(handle.__code__)
    changed.is_infra_mode = classmethod(lambda cls: True)
    changed.__torch_dispatch__ = handle


_sees_higher_order = _places.take(
    "torch.utils._python_dispatch.TorchDispatchMode.supports_higher_order_operators",
    None,
    "each higher-order operator gets a rule for each mode of a capture",
)
_higher_order: Mapping[str, Any] = _places.take(
    "torch._ops._higher_order_ops", {}, "programs with higher-order operators fail if torch requires rules for modes"
)


def see_higher_order(mode: type[TorchDispatchMode]) -> None:
    if _sees_higher_order is None:
        for operator in _higher_order.values():
            if mode not in operator.python_key_table:
                run = lambda func, mode, *args, **kwargs: mode.__torch_dispatch__(func, (), args, kwargs)  # noqa: E731
                operator.py_impl(mode)(partial(run, operator))


_NOT_INSIDE = "calls inside higher-order operators are not recorded"
_HigherOrder: Any = _places.take("torch._ops.HigherOrderOperator", (), _NOT_INSIDE)
_keys_of = _places.take("torch._ops._compute_keyset", None, _NOT_INSIDE)
_resolve = _places.take("torch._ops.resolve_key", None, _NOT_INSIDE)
_MODE_HERE = "_get_current_dispatch_mode"
# dispatch keys at which a mode, a tensor subclass or a transform handles a call again
_REDISPATCHING = ("Python", "PythonDispatcher", "PreDispatch", "FuncTorchDynamicLayerFrontMode")


def is_higher_order(func: Any) -> bool:
    return isinstance(func, _HigherOrder)


def own_code(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    if _keys_of is None or _resolve is None:
        return None
    key = _keys_of(tuple(args), dict(kwargs), func.non_fallthrough_keys).highestPriorityTypeId()
    if key.name in _REDISPATCHING:
        return None
    try:
        code = func.py_kernels[_resolve(func, key)]
    except (NotImplementedError, KeyError) as error:
        raise_if_from_program(error)
        return None
    return _under_modes(code) if isinstance(code, FunctionType) else None


def _under_modes(code: FunctionType) -> Callable[..., Any]:
    if _MODE_HERE not in code.__code__.co_names:
        return code
    names = {**code.__globals__, _MODE_HERE: lambda: None}
    copy = FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)
    copy.__kwdefaults__ = code.__kwdefaults__
    return copy


_COMPILES = "disable_cache_limit"
_UTILS = "torch._dynamo.utils"
_compiles = _places.take_later(
    f"{_UTILS}.{_COMPILES}",
    None,
    "functions passed to higher-order operators are not compiled, and some have no gradients",
)


def place_of_compiling() -> tuple[Any, str] | None:
    return None if _compiles() is None else (import_module(_UTILS), _COMPILES)


_stance = _places.take_later(
    "torch._dynamo.eval_frame._stance", None, "the compiler stance that the program has set is unknown, and ignored"
)


def stance_here() -> str:
    if _stance() is None:
        return "default"
    # read it each time, because each change replaces the object
    stance: str = import_module("torch._dynamo.eval_frame")._stance.stance
    return stance


def compiling_as_unwatched(entered: Callable[[], Any], stance: Callable[[], str]) -> Callable[[], Any]:
    @contextmanager
    def enter() -> Iterator[None]:
        with torch.compiler.set_stance(stance()), modes_hidden_from_compiler(), entered():
            yield

    return enter
