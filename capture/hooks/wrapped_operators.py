"""What a call's node runs in place of its plain operator: timed, counted, looked at, or with its functions recorded.

A node (see `capture/signatures/predictions.py`) holds the callable that runs its calls. Work that only some calls need
replaces that callable, so that all other calls cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any

import torch

from opgrip.capture.program.accelerators import accelerator_of
from opgrip.capture.recording.observations import Look
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.thread_mode import ThreadMode
from opgrip.capture.signatures.predictions import CallPoint, Recognizer
from opgrip.capture.signatures.signatures import tensors_in
from opgrip.capture.timing.page_faults import may_need_pages
from opgrip.capture.torch_compat.compiler_private import own_code
from opgrip.traces.schema.arguments import Opaque
from opgrip.traces.schema.records import FUNCTION, HIGHER_ORDER, NO_STORAGE

Run = Callable[..., Any]


def measured(
    recorder: Recorder,
    mode: ThreadMode,
    number: int,
    run: Run,
    func: Any,
    values: Sequence[Any],
    started: Callable[[], int],
    on_device: bool = True,
) -> Run | None:
    """Return `run` with its device time or page faults measured, or None if the call can have neither.

    Parameters
    ----------
    number : of the call's signature
    func : the operator; None for other functions
    values : the call's arguments
    started : returns the start in ns of the call that runs, which identifies the measurement
    on_device : whether the call has a device time of its own
    """
    tensors = tensors_in(values)
    device = accelerator_of(tensors, values) if on_device else None
    if device is not None:
        kernels = recorder.kernels
        if kernels is None:
            return mode.device.timed(run, device, started)
        kernels.expect(number, device)
        return run
    if may_need_pages(func, tensors, recorder.signatures.output_bytes(number)):
        return mode.faults.counted(run, started)
    return None


class _Watched:
    """The operator of a node whose next call is looked at, for as long as its signature wants looks."""

    __slots__ = ("_mode", "_node", "_operator", "_timed")

    def __init__(self, node: CallPoint, operator: Run, mode: ThreadMode) -> None:
        self._node, self._operator, self._mode = node, operator, mode
        self._timed = mode.faults.counted(operator, lambda: mode.started)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        node = self._node
        node.op = self._operator
        record_result = _look(node, self._mode, args, kwargs)
        if self._mode.recorder.observations.waits(node.number):
            node.op = self
        # timed separately: the look is not part of the call
        result = self._timed(*args, **kwargs)
        if record_result is not None:
            record_result(result)
        return result


def look_at(node: CallPoint, mode: ThreadMode) -> None:
    """Look at the values of the next call of a node."""
    operator = node.op
    # only once, whatever the number of reasons: a look within another one's operator would be part of its time
    if not isinstance(operator, _Watched):
        node.op = _Watched(node, operator, mode)


def _look(
    node: CallPoint, mode: ThreadMode, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[Any], None] | None:
    """Look at arguments; return what records the call's result, or None if the call needs no look."""
    recorder, observations = mode.recorder, mode.recorder.observations
    began = perf_counter_ns()
    first_storage = lambda: next(iter(mode.storages_in(args, kwargs)), NO_STORAGE)  # noqa: E731
    try:
        why = observations.take(node.number, lambda: (node.scope, first_storage()))
        if why is Look.NO:
            return None
        where = (began - recorder.started_ns, first_storage()) if why is Look.PLACE else ()
        return recorder.signatures.observe(node.number, node.func, args, kwargs, *where)
    except Exception as error:
        recorder.lost.lose_values(str(node.func), error)
        return None
    finally:
        observations.spend(mode.own_work.add(began))


def higher_order_node(
    recorder: Recorder, mode: ThreadMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: int
) -> CallPoint | None:
    """Return the node of a call of an operator that takes functions, such as `torch.cond` and `flex_attention`.

    torch takes a dispatch mode off while an operator runs, and so while the functions run that it is given. The node's
    `op` puts the mode back on around the operator's own code, so that their calls are recorded too.

    None where another mode or a subclass of the program runs the operator, and inside an extension's function or a
    compiled region, which stand for all that they call.

    Parameters
    ----------
    tensors : number of tensors that the call takes
    """
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
    node = CallPoint(Recognizer(number, func), (), scope, pair, None)

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
    """Return an argument with a placeholder for each function, which is another object in each call."""
    if isinstance(value, tuple | list):
        items = [_without_functions(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {name: _without_functions(item) for name, item in value.items()}
    return Opaque("function") if callable(value) and not isinstance(value, torch.Tensor | type) else value
