"""Rows without a measurement: before a case runs, and with the reason if it cannot be measured."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from dataclasses import replace

from opgrip.errors import UserError, cause_of
from opgrip.replay.cases.call_sites import module_of, phase_of, to_text
from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.variants import BACKWARD, Variant
from opgrip.replay.inputs.filling import cast_signature
from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.operators.memory import bytes_of, is_out_of_memory
from opgrip.replay.results.results import FAILED, OK, UNSUPPORTED, Result, describe_shapes
from opgrip.replay.run.workload import Workload

OUT_OF_MEMORY = "out of memory"
"""start of the reason of a row that ran out of memory"""

_NO_KERNEL = re.compile(r"implementation for device \S+ not found|not compiled with (?:gpu|cuda)", re.IGNORECASE)
"""messages of extensions (mmcv's registry, builds without CUDA) for errors that torch reports as NotImplementedError"""

_NO_DERIVATIVE = re.compile(r"(?:the )?derivative for .+? is not implemented")
"""message of autograd for an operator or argument without a derivative"""


def expected_rows(cases: Iterable[Case], workload: Workload) -> list[Result]:
    """Return the rows of a replay without measurements."""
    return [empty_row(case, way, workload) for case in cases for way in workload.ways(case)]


def empty_rows(case: Case, workload: Workload, status: str, error: str) -> dict[int, Result]:
    """Return the rows of a case that cannot be measured, by row number."""
    return {way.number: empty_row(case, way, workload, status, error) for way in workload.ways(case)}


def empty_row(case: Case, way: Variant, workload: Workload, status: str = OK, error: str | None = None) -> Result:
    """Return the row of a case before it runs, or with the reason why it cannot run."""
    signature, forward = cast_signature(case.signature, workload.dtype), way.direction != BACKWARD
    return Result(
        case=case.number,
        op=case.op,
        shapes=describe_shapes(signature),
        count=case.count,
        share=case.share,
        mode=way.mode,
        device=workload.device,
        status=status,
        key=case.key,
        module=module_of(case.call_sites),
        phase=phase_of(case.call_sites) or case.phase,
        call_sites=to_text(case.call_sites),
        captured_us=case.captured_us,
        captured_total_us=case.captured_total_us,
        captured_host_us=case.captured_host_us,
        captured_spread=case.captured_spread,
        perturbed=case.perturbed,
        values=way.values,
        direction=way.direction,
        dtype="" if signature == case.signature else str(workload.request.inputs.dtype),
        tune=workload.request.tuning.words_of(way.mode),
        cache=workload.cache_of(way),
        method=workload.timing.exec_mode,
        threads=way.point.threads,
        batch_scale=way.point.batch,
        streams=way.point.streams,
        bytes_in=bytes_of([signature.args, signature.kwargs]) if forward else None,
        bytes_out=bytes_of(signature.outputs) if forward else None,
        error=error,
    )


def describe_failure(error: BaseException) -> tuple[str, str]:
    """Return the status and reason for a case that raised an error."""
    if isinstance(error, UserError) and isinstance(error.__cause__, ModuleNotFoundError):
        error = error.__cause__
    # check first: a compiler that runs out of memory raises its own error
    if is_out_of_memory(error):
        cause = cause_of(error)
        return FAILED, cause if cause.startswith(OUT_OF_MEMORY) else f"{OUT_OF_MEMORY}: {cause}"
    if isinstance(error, Unsupported):
        return UNSUPPORTED, str(error)
    if missing := _NO_DERIVATIVE.search(str(error)):
        return UNSUPPORTED, f"not differentiable: {missing[0]}"
    if isinstance(error, UserError):
        return FAILED, str(error)
    if isinstance(error, ModuleNotFoundError):
        return UNSUPPORTED, f"it needs {error.name}, which is not installed"
    if isinstance(error, NotImplementedError) or _NO_KERNEL.search(str(error)):
        return UNSUPPORTED, cause_of(error)
    return FAILED, cause_of(error)


def failed(result: Result, error: BaseException, workload: Workload) -> Result:
    """Return the row of a case that raised an error."""
    status, reason = describe_failure(error)
    detail = "".join(traceback.format_exception(error)) if workload.request.detail else None
    return replace(result, status=status, error=reason, detail=detail)
