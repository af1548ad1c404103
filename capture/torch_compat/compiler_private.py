"""What capture takes from torch's private interfaces so that its modes and torch's compiler leave each other alone."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, TracebackType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.platform.private_apis import PrivatePlaces

_places = PrivatePlaces()


def private_places() -> dict[str, str]:
    """For each private place of torch that is used here `found`, or what is done instead where this torch lacks it."""
    return _places.report()


_set_strategy = _places.take(
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    None,
    "modes run in torch's guard against its compiler where it has one for them; else nothing hides them",
)
_actions = _places.take("torch._C._dynamo.eval_frame._FrameAction", None, "as for set_code_exec_strategy")
_strategy_of = _places.take("torch._C._dynamo.eval_frame._FrameExecStrategy", None, "as for set_code_exec_strategy")


def hide_from_compiler(function: FunctionType) -> bool:
    """Keep torch.compile from tracing a function and all that it calls; False where this torch has no means to.

    What a dispatch mode runs inside a compiled region is else compiled with it. torch's own means, a guard around the
    mode's handler, does the same at each call, for half the cost of an empty mode.
    """
    try:
        _set_strategy(function.__code__, _strategy_of(_actions.SKIP, _actions.SKIP))
    except (AttributeError, TypeError):
        return False
    return True


_MODES_MODULE = "torch.utils._python_dispatch"
_OF_COMPILED = "_is_in_any_mode_without_ignore_compile_internals"
_MODE_FLAGS = tuple(
    name
    for name in (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        _OF_COMPILED,
    )
    if _places.take(f"{_MODES_MODULE}.{name}", None, "nothing: this torch keeps no such flag") is not None
)


_flags_lock = threading.RLock()


_modes_here = _places.take(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    None,
    "a forked process takes the modes of its parent's other threads for its own",
)


def _renew_flags() -> None:
    # a thread that is not there any more may have held it
    global _flags_lock
    _flags_lock = threading.RLock()
    if OrderlyMode._entered and _modes_here is not None:
        OrderlyMode._count_entered(sum(isinstance(mode, OrderlyMode) for mode in _modes_here()))


os.register_at_fork(after_in_child=_renew_flags)


class OrderlyMode(TorchDispatchMode):
    """A dispatch mode that may be left in any order, and by threads at once.

    Flags that all threads share say whether a mode is on, and each mode sets them back to what they were when it was
    entered. Where the one that was entered first is left first, the other would set them for ever, and torch.compile
    compile nothing any more. So here they are as they were before the first mode once the last one is left.
    """

    _entered = 0
    _flags_before: Mapping[str, bool] = {}

    def __enter__(self) -> Any:
        with _flags_lock:
            if not OrderlyMode._entered:
                OrderlyMode._flags_before = _flags()
            OrderlyMode._entered += 1
            return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _flags_lock:
            super().__exit__(kind, error, traceback)
            self.forget()

    def forget(self) -> None:
        """Count it as left, where its thread has ended in it, which alone could leave it."""
        with _flags_lock:
            OrderlyMode._count_entered(OrderlyMode._entered - 1)

    @staticmethod
    def _count_entered(count: int) -> None:
        OrderlyMode._entered = count
        if not count:
            _set_flags(OrderlyMode._flags_before)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether torch may compile under this mode: where the thread has hidden its modes."""
        return getattr(_hidden, "modes", False)


_hidden = threading.local()
_set_compiled_flag = _places.take(
    "torch._C._dynamo.guards.set_is_in_mode_without_ignore_compile_internals",
    lambda value: None,
    "nothing: this torch keeps no such flag",
)


def _flags() -> dict[str, bool]:
    return {name: getattr(sys.modules[_MODES_MODULE], name) for name in _MODE_FLAGS}


def _set_flags(flags: Mapping[str, bool]) -> None:
    for name, value in flags.items():
        setattr(sys.modules[_MODES_MODULE], name, value)
    _set_compiled_flag(flags.get(_OF_COMPILED, False))


@contextmanager
def modes_hidden_from_compiler() -> Iterator[None]:
    """In the block, torch compiles as if none of our modes were on; what comes out runs under them."""
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
    "such modes are called modes of torch's own, and run in its guard against its compiler",
)
_disable_dynamo = _places.take("torch._disable_dynamo", lambda function: function, "nothing hides such modes")
_skip_code = _places.take(
    "torch._C._dynamo.eval_frame.skip_code", lambda code: None, "nothing: versions without it know such modes"
)


def leave_compiled(mode: type[TorchDispatchMode]) -> None:
    """Let compiled code run as it is under a class of modes whose `ignore_compile_internals` says so."""
    if _runs_compiled_code is not None:
        return
    changed: Any = mode
    plain = changed.__torch_dispatch__
    hidden = _disable_dynamo(plain)

    def handle(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # to hide imports the compiler, which calls operators while it is imported
        is_loaded = hasattr(sys.modules.get("torch._dynamo"), "disable")
        return (hidden if is_loaded else plain)(self, func, types, args, kwargs)

    _skip_code(handle.__code__)
    changed.is_infra_mode = classmethod(lambda cls: True)
    changed.__torch_dispatch__ = handle
