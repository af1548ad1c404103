"""Looks at a call from its node: the node gets another operator for one time, so the calls between cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any, Protocol

from opgrip.capture.recording.observations import Look
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.signatures.predictions import Node
from opgrip.capture.timing.own_work import OwnWork
from opgrip.capture.timing.page_faults import FaultCounter
from opgrip.traces.schema.records import NO_STORAGE

Told = Callable[[Any], None]
"""What is told the result of a call that was looked at."""


class Mode(Protocol):
    """What a mode is asked for a look; the attributes are those of `ThreadMode`."""

    recorder: Recorder
    faults: FaultCounter
    own_work: OwnWork
    started: int

    def storages_in(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
        """The numbers of the memory of a call's tensors."""


class _Watched:
    """The operator of a node whose next call is looked at, as long as its signature is to be."""

    __slots__ = ("_mode", "_node", "_operator", "_timed")

    def __init__(self, node: Node, operator: Callable[..., Any], mode: Mode) -> None:
        self._node, self._operator, self._mode = node, operator, mode
        self._timed = mode.faults.counted(operator, lambda: mode.started)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        node = self._node
        node.op = self._operator
        record_result = _look(node, self._mode, args, kwargs)
        if self._mode.recorder.observations.waits(node.number):
            node.op = self
        # its own time is kept: the look is no part of it
        result = self._timed(*args, **kwargs)
        if record_result is not None:
            record_result(result)
        return result


def look_at(node: Node, mode: Mode) -> None:
    """Let the next call of a node be looked at, as long as its signature is to be."""
    operator = node.op
    # once however many of its places are waited for: a look within another one's operator would be a part of its time
    if not isinstance(operator, _Watched):
        node.op = _Watched(node, operator, mode)


def _look(node: Node, mode: Mode, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Told | None:
    """Look at arguments; gives what is to be told the result, None where the call is not to be looked at."""
    recorder, observations = mode.recorder, mode.recorder.observations
    began = perf_counter_ns()
    try:
        why = observations.take(node.number, lambda: (node.scope, _first_storage(mode, args, kwargs)))
        if why is Look.NO:
            return None
        call = (began, _first_storage(mode, args, kwargs)) if why is Look.PLACE else None
        return recorder.observe(node.number, node.func, args, kwargs, call)
    except Exception as error:
        recorder.lose_values(str(node.func), error)
        return None
    finally:
        observations.spend(mode.own_work.add(began))


def _first_storage(mode: Mode, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The number of the memory of a call's first tensor."""
    return next(iter(mode.storages_in(args, kwargs)), NO_STORAGE)
