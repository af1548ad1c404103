"""Which of a profiler's events are the calls that a capture would record, and where in the program they were made.

A dispatch mode sees what comes out of autograd: not the composite operators that call others, and nothing of what an
operator calls itself. The profiler has all of these, each inside of its caller.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from opgrip.traces.formats.overloads import NAME, schemas_of
from opgrip.traces.formats.profiler_events import FRAME, MODULE, RANGE, DeviceWork, Event
from opgrip.traces.schema.records import Scope

BACKWARD = "autograd::engine::evaluate_function: "
STEP = "Optimizer.step#"
FRAME_NAME = re.compile(r"(.+)\((\d{1,9})\): (.+)")
FOREIGN_FRAME = re.compile(r"<|torch/|.*/(?:torch|site-packages)/|.*/lib/python3\.\d+/|(?:threading|contextlib)\.py")
"""Files of Python functions that are no part of the program."""
COMPOSITE = "CompositeImplicitAutograd"
NOT_REGISTERED = "not registered in this torch: what it called stands for it"


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """A call that a capture would record.

    Attributes
    ----------
    forward : number of the forward call that caused it, as the profiler has it; -1 for none
    work : what it ran on an accelerator; None for nothing
    """

    event: Event
    scope: Scope
    forward: int
    work: DeviceWork | None


@dataclass(slots=True)
class _Open:
    """An event that has not ended: where what is inside of it stands.

    Attributes
    ----------
    call : the recorded call that it is, or that it is inside of
    """

    end_ns: int
    scope: Scope
    forward: int
    call: _Pending | None = None
    is_call: bool = False


@dataclass(slots=True)
class _Pending:
    event: Event
    scope: Scope
    forward: int
    work: DeviceWork


def calls_of(
    events: Iterable[Event], work: dict[int, DeviceWork], skip: Callable[[str, str], None]
) -> Iterator[OperatorCall]:
    """The calls of one thread, in the order in which they ended.

    Parameters
    ----------
    events : in the order in which they began, those around others first
    skip : is told of operators that are not among them, with the reason
    """
    root = _Open(1 << 62, Scope(0, "", "", "forward"), -1)
    stack = [root]
    for event in events:
        while len(stack) > 1 and stack[-1].end_ns <= event.start_ns:
            yield from _ended(stack.pop())
        inner = _entered(stack[-1], event, skip)
        if inner.call is not None and event.external in work:
            inner.call.work.add(work[event.external])
        stack.append(inner)
    while len(stack) > 1:
        yield from _ended(stack.pop())


def _ended(item: _Open) -> Iterator[OperatorCall]:
    if item.is_call and item.call is not None:
        call = item.call
        yield OperatorCall(call.event, call.scope, call.forward, call.work if call.work.launches else None)


def _entered(outer: _Open, event: Event, skip: Callable[[str, str], None]) -> _Open:
    inner = _Open(event.end_ns, outer.scope, outer.forward, outer.call)
    kind, name = event.slice.kind, event.slice.name
    if outer.call is not None:
        return inner
    if kind == MODULE:
        # the outermost is the model, whose path is empty
        path = "" if not outer.scope.module_type else f"{outer.scope.module}.{name}".removeprefix(".")
        inner.scope = replace(outer.scope, module=path, module_type=name.rpartition("_")[0] or name)
    elif kind == FRAME:
        inner.scope = _with_frame(outer.scope, name)
    elif kind == RANGE:
        inner.scope = replace(outer.scope, phase="optimizer") if name.startswith(STEP) else outer.scope
    elif name.startswith(BACKWARD):
        inner.scope, inner.forward = replace(outer.scope, phase="backward"), event.sequence
    elif NAME.fullmatch(name) and "::" in name:
        inputs = event.slice.inputs
        if _is_composite(name, None if inputs is None else len(inputs)):
            return inner
        if not schemas_of(name):
            skip(name, NOT_REGISTERED)
            return inner
        inner.call = _Pending(event, outer.scope, outer.forward, DeviceWork(Counter(), Counter()))
        inner.is_call = True
    elif name.startswith("triton_"):
        skip(name, "a kernel that torch.compile made, which is no operator")
    return inner


def _with_frame(scope: Scope, name: str) -> Scope:
    match = FRAME_NAME.fullmatch(name)
    if match is None or FOREIGN_FRAME.match(match[1]):
        return scope
    around = (f"{scope.file}:{scope.line} {scope.function}",) if scope.file else ()
    callers = (*around, *scope.callers)[:16]
    return replace(scope, file=match[1], line=int(match[2]), function=match[3], callers=callers)


@lru_cache(maxsize=4096)
def _is_composite(name: str, count: int | None) -> bool:
    """Whether autograd sees nothing of an operator but what it calls.

    Parameters
    ----------
    count : how many arguments it took; None where that is not known
    """
    kernels = [_has_composite_kernel(item) for item in schemas_of(name) if count in (None, len(item.arguments))]
    known = [is_composite for is_composite in kernels if is_composite is not None]
    return bool(known) and (all(known) if count is not None else known[0])


def _has_composite_kernel(schema: Any) -> bool | None:
    """None for what TorchScript alone has."""
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, COMPOSITE))
    except RuntimeError:
        return None
