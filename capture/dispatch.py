"""The dispatch mode: sees every operator that the dispatcher runs in its thread, below autograd and autocast."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from types import FunctionType
from typing import Any, cast

from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.capture.recorder import NOT_RECORDED, Recorder
from opgrip.capture.torch_private import hide_from_compiler
from opgrip.traces.records import OPERATOR


class RecordingMode(TorchDispatchMode):
    """Runs every operator as it was called, and tells the recorder.

    Control flow such as `torch.cond` is one call; what it runs inside is not seen.
    """

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # whether torch is to wrap the handler in its guard
        return not cls._hidden

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record and run one operator."""
        kwargs = kwargs or {}
        recorder = self.recorder
        signature = recorder.enter(func, OPERATOR, args, kwargs)
        if signature == NOT_RECORDED:
            return func(*args, **kwargs)
        start = perf_counter_ns()
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            recorder.leave(signature, start, perf_counter_ns(), None, error)
            raise
        recorder.leave(signature, start, perf_counter_ns(), result, None)
        return result

    _hidden = hide_from_compiler(cast(FunctionType, __torch_dispatch__))
