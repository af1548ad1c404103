"""Why a case could not be measured, by the error that it raised."""

from __future__ import annotations

import re
import traceback
from dataclasses import replace

from opgrip.errors import UserError, cause_of
from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.operators.memory import is_out_of_memory
from opgrip.replay.results.results import FAILED, UNSUPPORTED, Result
from opgrip.replay.run.workload import Workload

OUT_OF_MEMORY = "out of memory"
"""Beginning of the reason of a row that had too little of it."""

_NO_KERNEL = re.compile(r"implementation for device \S+ not found|not compiled with (?:gpu|cuda)", re.IGNORECASE)
"""How extensions (mmcv's registry; builds without CUDA) say what torch says by NotImplementedError."""

_NO_DERIVATIVE = re.compile(r"(?:the )?derivative for .+? is not implemented")
"""How autograd refuses an operator, or an argument of one."""


def describe_failure(error: BaseException) -> tuple[str, str]:
    """Status and reason of a case that raised."""
    if isinstance(error, UserError) and isinstance(error.__cause__, ModuleNotFoundError):
        error = error.__cause__
    # first: what a compiler refuses for want of memory it can do
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
    """A row whose making or running raised."""
    status, reason = describe_failure(error)
    detail = "".join(traceback.format_exception(error)) if workload.request.detail else None
    return replace(result, status=status, error=reason, detail=detail)
