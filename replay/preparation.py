"""Makes of a case what is measured: finds its operator, makes its arguments, and runs it a first time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from opgrip.replay.arguments.inputs import Inputs
from opgrip.replay.arguments.values import with_values
from opgrip.replay.backward import backward_of
from opgrip.replay.cases import Case
from opgrip.replay.contexts import restored
from opgrip.replay.operators import Operator, Unsupported, find_operator
from opgrip.replay.results import (
    BACKWARD,
    FAILED,
    OK,
    SKIPPED,
    UNSUPPORTED,
    Result,
    describe_shapes,
    same_outputs,
)
from opgrip.replay.settings import EAGER, Settings
from opgrip.replay.timing.caches import PROGRAM
from opgrip.replay.timing.subjects import Subject, Variant
from opgrip.replay.work import bytes_of, flops_of, with_memory
from opgrip.traces.arguments import TensorSpec, map_leaves, tensors
from opgrip.traces.errors import one_line
from opgrip.traces.records import Signature
from opgrip.traces.tensor_specs import shape_of

Prepared = tuple[Result, Subject | None]
"""A row, and what fills it in; None where the row says already why nothing can."""


def prepare(case: Case, settings: Settings) -> list[Prepared]:
    """The rows of a case, one for each way to draw its values and each direction."""
    rows: list[Prepared] = []
    for kind in settings.values:
        result = _empty_row(case, settings, kind)
        if case.signature.raised is not None:
            error = f"it raised when it was captured: {case.signature.raised}"
            rows.append((replace(result, status=SKIPPED, error=error), None))
            continue
        rows.append(_guarded(result, lambda result=result: _forward(case, settings, result)))  # type: ignore[misc]
        if settings.wants_grad(case):
            backward = replace(result, direction=BACKWARD)
            rows.append(_guarded(backward, lambda row=backward: _backward(case, settings, row)))  # type: ignore[misc]
    return rows


def empty_rows(case: Case, settings: Settings, status: str, error: str) -> list[Result]:
    """The rows of a case that could not be measured, for this reason."""
    rows = [replace(_empty_row(case, settings, kind), status=status, error=error) for kind in settings.values]
    backward = [replace(row, direction=BACKWARD) for row in rows if settings.wants_grad(case)]
    return rows + backward


def describe_failure(error: BaseException) -> tuple[str, str]:
    """Status and reason of a case that raised."""
    if isinstance(error, Unsupported):
        return UNSUPPORTED, str(error)
    if isinstance(error, NotImplementedError):
        return UNSUPPORTED, one_line(error, 300)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return FAILED, f"out of memory: {one_line(error, 200)}"
    return FAILED, one_line(error, 300)


def _guarded(result: Result, make: Callable[[], Prepared]) -> Prepared:
    try:
        return make()
    except Exception as error:
        status, reason = describe_failure(error)
        return replace(result, status=status, error=reason), None


def _empty_row(case: Case, settings: Settings, kind: str) -> Result:
    signature = case.signature
    return Result(
        case=case.number,
        op=case.op,
        shapes=describe_shapes(signature),
        count=case.count,
        share=case.share,
        mode=EAGER,
        device=settings.device,
        status=OK,
        captured_us=case.captured_us,
        captured_total_us=case.captured_total_us,
        values=kind,
        bytes_in=bytes_of([signature.args, signature.kwargs]),
        bytes_out=bytes_of(signature.outputs),
    )


def _forward(case: Case, settings: Settings, result: Result) -> Prepared:
    operator = case.operator or find_operator(case.signature, settings.extensions)
    # captured below autograd, so replayed without it
    with restored(settings.context_of(case)), torch.set_grad_enabled(settings.wants_grad(case)):
        variants, faithful = [], []
        for signature in (case.signature, *case.variants):
            inputs = _inputs(signature, case, settings, result.values)
            result, met = _first_run(result, operator, inputs, signature, settings)
            variants.append(Variant([inputs]))
            faithful.append(met)
        result = replace(result, faithful=None if None in faithful else all(faithful))
        subject = Subject(
            case.number,
            _label(case),
            operator.function,
            variants,
            operator.mutates,
            case.fresh if settings.device == "cpu" and settings.cache == PROGRAM else None,
            result.bytes_out or 0,
        )
        for _ in range(settings.effort.warmup):
            subject.run()
    return result, subject


def _backward(case: Case, settings: Settings, result: Result) -> Prepared:
    operator = case.operator or find_operator(case.signature, settings.extensions)
    with restored(settings.context_of(case)), torch.enable_grad():
        inputs = _inputs(case.signature, case, settings, result.values)
        function, prepare_graph = backward_of(operator, inputs)
        subject = Subject(case.number, _label(case), function, [Variant([inputs])], False, None, 0, prepare_graph)
        for _ in range(1 + settings.effort.warmup):
            subject.run()
    return replace(result, bytes_in=None, bytes_out=None), subject


def _inputs(signature: Signature, case: Case, settings: Settings, kind: str) -> Inputs:
    drawn, models = with_values(signature, case.values, kind)
    needed = Inputs.bytes_needed(signature.args, signature.kwargs, settings.dtype) + bytes_of(signature.outputs)
    if settings.memory_limit is not None and needed > settings.memory_limit:
        raise MemoryError(f"its tensors are {needed / 1e9:,.1f} GB, the limit is {settings.memory_limit / 1e9:,.1f} GB")
    return Inputs(drawn.args, drawn.kwargs, models, settings.place, settings.seed, settings.dtype)


def _first_run(
    result: Result, operator: Operator, inputs: Inputs, signature: Signature, settings: Settings
) -> tuple[Result, bool | None]:
    """Run it once, for what does not change: the outputs' shapes, flops, memory."""
    if operator.mutates:
        inputs.keep()
    args, kwargs = inputs.make()
    function = operator.function
    if settings.memory and result.peak_bytes is None:
        outputs, memory = with_memory(lambda: function(*args, **kwargs), _device_of(signature, settings))
        result = replace(result, allocated_bytes=memory.allocated, peak_bytes=memory.peak)
    else:
        outputs = function(*args, **kwargs)
    if result.flops is None:
        result = replace(result, flops=flops_of(function, args, kwargs, outputs))
    return result, same_outputs(signature.outputs, _outlines(outputs), settings.dtype is None)


def _device_of(signature: Signature, settings: Settings) -> str:
    devices = {settings.place(spec.device) for spec in tensors([signature.args, signature.kwargs])}
    return next((device for device in sorted(devices) if device != "cpu"), settings.device)


def _label(case: Case) -> str:
    return f"{case.op} #{case.number}"


def _outlines(outputs: Any) -> Any:
    """Outputs with a spec of shape and dtype in each tensor's place."""

    def outline(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return TensorSpec(shape_of(leaf), None, leaf.dtype, str(leaf.device))

    return map_leaves(outline, outputs)
