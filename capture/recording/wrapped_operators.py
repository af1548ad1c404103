"""Callables that run in place of an operator, to measure device time, count page faults or observe values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from opgrip.capture.program.accelerators import accelerator_of
from opgrip.capture.recording.observations import Look
from opgrip.capture.signatures.predictions import CallNode, Recognizer
from opgrip.capture.signatures.signatures import tensors_in
from opgrip.capture.timing.page_faults import may_need_pages
from opgrip.capture.torch_compat.compiler_private import own_code
from opgrip.platform import perf_counter_ns
from opgrip.traces.schema.arguments import Opaque
from opgrip.traces.schema.records import FUNCTION, HIGHER_ORDER, NO_STORAGE

if TYPE_CHECKING:
    from opgrip.capture.recording.thread_mode import ThreadMode

Run = Callable[..., Any]


def measured(
    mode: ThreadMode,
    number: int,
    run: Run,
    func: Any,
    values: Sequence[Any],
    started: Callable[[], int],
    on_device: bool = True,
) -> Run | None:
    """Return a function that calls `run` and measures device time or page faults, or None if neither is needed.

    started : returns the start in ns of the running call, to which the measurement belongs
    """
    tensors = tensors_in(values)
    device = accelerator_of(tensors, values) if on_device else None
    if device is not None:
        return timed_on(mode, number, run, device, started)
    if may_need_pages(func, tensors, mode.recorder.signatures.output_bytes(number)):
        return mode.faults.counted(run, started)
    return None


def timed_on(mode: ThreadMode, number: int, run: Run, device: torch.device, started: Callable[[], int]) -> Run:
    recorder = mode.recorder
    if recorder.kernels is None or not recorder.kernels.expect(number, device, recorder.graphs):
        return mode.device.timed(run, device, started)
    return mode.device.with_stream(run, device, started) if recorder.uses_streams else run


class _Watched:
    __slots__ = ("_mode", "_node", "_operator", "_timed")

    def __init__(self, node: CallNode, operator: Run, mode: ThreadMode) -> None:
        self._node, self._operator, self._mode = node, operator, mode
        self._timed = mode.faults.counted(operator, lambda: mode.started)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        node = self._node
        node.op = self._operator
        record_result = _look(node, self._mode, args, kwargs)
        recorder = self._mode.recorder
        if recorder.observations.waits(node.number) or recorder.signatures.is_unread(node.number):
            node.op = self
        # timed separately, because the observation is not part of the call
        result = self._timed(*args, **kwargs)
        if record_result is not None:
            record_result(result)
        return result


def schedule_observation(node: CallNode, mode: ThreadMode) -> None:
    operator = node.op
    # wrap only once, even for several reasons: an observation inside another one would be part of the measured time
    if not isinstance(operator, _Watched):
        node.op = _Watched(node, operator, mode)


def _look(
    node: CallNode, mode: ThreadMode, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[Any], None] | None:
    recorder, observations = mode.recorder, mode.recorder.observations
    began = perf_counter_ns()
    first_storage = lambda: next(iter(mode.storages_in(args, kwargs)), NO_STORAGE)  # noqa: E731
    try:
        if recorder.signatures.is_unread(node.number) and observations.is_affordable():
            return recorder.signatures.read_again(node.number, node.func, args, kwargs)
        why = observations.take(node.number, lambda: (node.scope, first_storage()))
        if why is Look.NO:
            return None
        where = (began - recorder.started_ns, first_storage()) if why is Look.SITE else ()
        return recorder.signatures.observe(node.number, node.func, args, kwargs, *where)
    except Exception as error:
        recorder.lost.lose_values(str(node.func), error)
        return None
    finally:
        observations.spend(mode.own_work.add(began))


def higher_order_node(
    mode: ThreadMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: int
) -> CallNode | None:
    recorder = mode.recorder
    if mode.place.inside is not None and not mode.place.gripped:
        return None
    code = own_code(func, args, kwargs)
    if code is None:
        return None
    name = HIGHER_ORDER + func.name()
    positional = [_without_functions(value) for value in args]
    named = {key: _without_functions(value) for key, value in kwargs.items()}
    number = recorder.signatures.number(name, FUNCTION, positional, named)
    scope, pair = recorder.scopes.point(number, mode.place, tensors + 1)
    node = CallNode(Recognizer(number, func), (), scope, pair, None)

    def run(*args: Any, **kwargs: Any) -> Any:
        mode.enter(node, recorder.places.inside(mode.place, name, True))
        try:
            with mode:
                return code(*args, **kwargs)
        finally:
            mode.leave(node)

    node.op = run
    return node


def _without_functions(value: Any) -> Any:
    if isinstance(value, tuple | list):
        items = [_without_functions(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {name: _without_functions(item) for name, item in value.items()}
    return Opaque("function") if callable(value) and not isinstance(value, torch.Tensor | type) else value
