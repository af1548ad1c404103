"""What capture takes from torch's private interfaces about operators that take functions, such as `torch.cond`.

torch's list of them, how one is dispatched, and how it compiles the functions that one is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.capture.torch_compat.compiler_private import modes_hidden_from_compiler
from opgrip.errors import raise_if_from_program
from opgrip.platform.private_apis import PrivatePlaces

_places = PrivatePlaces()


def private_places() -> dict[str, str]:
    """For each private place of torch that is used here `found`, or what is done instead where this torch lacks it."""
    return _places.report()


_sees_higher_order = _places.take(
    "torch.utils._python_dispatch.TorchDispatchMode.supports_higher_order_operators",
    None,
    "each operator that takes functions gets a rule for each of our modes",
)
_higher_order: Mapping[str, Any] = _places.take(
    "torch._ops._higher_order_ops", {}, "no rules: programs with such operators end where torch wants one"
)


def see_higher_order(mode: type[TorchDispatchMode]) -> None:
    """Let a class of modes see the operators that take functions."""
    if _sees_higher_order is None:
        for operator in _higher_order.values():
            if mode not in operator.python_key_table:
                operator.py_impl(mode)(partial(_run_higher_order, operator))


def _run_higher_order(operator: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
    return mode.__torch_dispatch__(operator, (), args, kwargs)


_NOT_INSIDE = "the calls that such operators make are not recorded"
_HigherOrder: Any = _places.take("torch._ops.HigherOrderOperator", (), _NOT_INSIDE)
_keys_of = _places.take("torch._ops._compute_keyset", None, _NOT_INSIDE)
_resolve = _places.take("torch._ops.resolve_key", None, _NOT_INSIDE)
_MODE_HERE = "_get_current_dispatch_mode"
_REDISPATCHING = ("Python", "PythonDispatcher", "PreDispatch", "FuncTorchDynamicLayerFrontMode")
"""Keys at which a mode, a subclass or a transform is asked again."""


def is_higher_order(func: Any) -> bool:
    """Whether an operator takes functions."""
    return isinstance(func, _HigherOrder)


def own_code(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """What such an operator runs once all modes have had it; None where one is left, or a subclass or a transform.

    It passes by the mode that is on, which so can be put back on around it.
    """
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
    """The same function; where it begins by asserting that no mode is on, a copy that finds none."""
    if _MODE_HERE not in code.__code__.co_names:
        return code
    names = {**code.__globals__, _MODE_HERE: lambda: None}
    copy = FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)
    copy.__kwdefaults__ = code.__kwdefaults__
    return copy


_COMPILES = "disable_cache_limit"
_UTILS = "torch._dynamo.utils"
_compiles = _places.take_later(
    f"{_UTILS}.{_COMPILES}", None, "their functions are not compiled: torch finds no gradients of some of them"
)


def place_of_compiling() -> tuple[Any, str] | None:
    """Module and name of what torch enters to compile the functions that such an operator is given; None for none."""
    return None if _compiles() is None else (import_module(_UTILS), _COMPILES)


_stance = _places.take_later(
    "torch._dynamo.eval_frame._stance", None, "a stance that the program has taken itself is not known, and left out"
)


def stance_here() -> str:
    """How torch is told to go about compiling, by `torch.compiler.set_stance`."""
    if _stance() is None:
        return "default"
    # it is another object after each change
    stance: str = import_module("torch._dynamo.eval_frame")._stance.stance
    return stance


def compiling_as_unwatched(entered: Callable[[], Any], stance: Callable[[], str]) -> Callable[[], Any]:
    """What torch enters there, in which it compiles as it does where nobody watches.

    It finds thereby what the functions close over, and which gradients there are. What comes out runs as the operators
    that the functions were made of. A stance of eager, and a mode, would keep torch from it.

    Parameters
    ----------
    stance : gives the one that the program had taken
    """

    @contextmanager
    def enter() -> Iterator[None]:
        with torch.compiler.set_stance(stance()), modes_hidden_from_compiler(), entered():
            yield

    return enter
