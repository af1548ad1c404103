"""The programs of a variant: calls under a mode, in another dtype, on another device, or of a candidate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from opgrip.replay.cases.flow import FlowingCall
from opgrip.replay.cases.selection import FORWARD, Variant
from opgrip.replay.inputs.filling import CAST
from opgrip.replay.inputs.input_options import RECORDED
from opgrip.replay.modes import CANDIDATE, EAGER
from opgrip.replay.operators.devices import check_use
from opgrip.replay.operators.lookup import Operator, find_operator
from opgrip.replay.operators.memory import Arguments, Function, tensors_in
from opgrip.replay.run.checks.permitted_differences import named
from opgrip.replay.run.programs import as_call, make_program
from opgrip.replay.sequences.call_timers import SequenceSettings
from opgrip.replay.sequences.step_memory import reason_of
from opgrip.traces.schema.arguments import map_leaves
from opgrip.traces.schema.operator_arguments import written
from opgrip.traces.schema.records import Signature


@dataclass(frozen=True, slots=True)
class CallKind:
    """How the calls of a signature can run.

    written : for each tensor argument, whether the call may write into it
    """

    operator: Operator
    written: list[bool]
    is_random: bool
    is_uninitialized: bool


@dataclass(slots=True)
class VariantPrograms:
    """The programs of a variant by signature, each made before the first call that runs it.

    dtype, device : dtype and device to which arguments are converted; None to keep theirs
    reasons : why calls run as in the reference, by signature number
    """

    settings: SequenceSettings
    dtype: torch.dtype | None
    device: str | None
    reasons: dict[int, str] = field(default_factory=dict)
    _kinds: dict[int, CallKind] = field(default_factory=dict)
    _programs: dict[int, Function | None] = field(default_factory=dict)

    @property
    def is_eager(self) -> bool:
        return self.settings.mode == EAGER and self.dtype is None and self.device is None

    def kind_of(self, signature: Signature) -> CallKind:
        kind = self._kinds.get(signature.number)
        if kind is None:
            operator = find_operator(signature, self.settings.extensions)
            about = named(operator.function, signature.op)
            kind = self._kinds[signature.number] = CallKind(
                operator,
                written(signature) if operator.mutates else [],
                is_random=about is not None and about.random,
                is_uninitialized=about is not None and about.uninitialized,
            )
        return kind

    def program(self, call: FlowingCall, signature: Signature, example: Callable[[], Arguments]) -> Function | None:
        """Return the program for a call, or None if it runs as in the reference; `example` copies its arguments."""
        if call.signature not in self._programs:
            self._programs[call.signature] = self._made(call, signature, example)
        return self._programs[call.signature]

    def remove(self, call: FlowingCall, error: Exception) -> None:
        check_use(self.settings.device, error)
        self._programs[call.signature], self.reasons[call.signature] = None, reason_of(error)

    def cast(self, tree: Any) -> Any:
        return map_leaves(self._convert, tree)

    def _made(self, call: FlowingCall, signature: Signature, example: Callable[[], Arguments]) -> Function | None:
        kind, mode = self.kind_of(signature), self.settings.mode
        if self.is_eager or kind.is_uninitialized or (kind.is_random and mode != CANDIDATE):
            return None
        if mode == CANDIDATE and self.settings.candidates.find(call.op) is None:
            if self.dtype is None:
                return None
            mode = EAGER
        function = kind.operator.function
        try:
            if mode != EAGER:
                args, kwargs = example()
                arguments = tuple(self.cast(args)), self.cast(kwargs)
                program = make_program(
                    kind.operator,
                    [arguments],
                    Variant(0, RECORDED, FORWARD, mode),
                    None,
                    False,
                    call.op,
                    device=self.device or self.settings.device,
                    store=None,
                    tuning=self.settings.tuning,
                    candidates=self.settings.candidates,
                    by_device=False,
                )
                function = as_call(program, kind.operator.mutates)
            return self._converting(function, kind.written)
        except Exception as error:
            check_use(self.settings.device, error)
            self.reasons[call.signature] = reason_of(error)
            return None

    def _convert(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return leaf if self.device is None else torch.device(self.device)
        if isinstance(leaf, torch.dtype):
            return self.dtype if self.dtype is not None and leaf in CAST else leaf
        if type(leaf) is float and self.dtype is not None and abs(leaf) != float("inf"):
            most = torch.finfo(self.dtype).max
            return min(max(leaf, -most), most)
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device=self.device, dtype=self.dtype if leaf.dtype in CAST else None)

    def _converting(self, function: Function, written: list[bool]) -> Function:
        if self.dtype is None and self.device is None:
            return function

        def run(*args: Any, **kwargs: Any) -> Any:
            own = tuple(self.cast(args)), self.cast(kwargs)
            result = function(*own[0], **own[1])
            for original, tensor, is_written in zip(
                tensors_in([args, kwargs]), tensors_in(list(own)), written, strict=False
            ):
                if is_written and tensor is not original:
                    original.copy_(tensor)
            return result

        return run
