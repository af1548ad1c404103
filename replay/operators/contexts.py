"""Runs a case under the settings of torch that its calls were captured under."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch

from opgrip.platform.precisions import parse_precisions, read_precision, set_precision
from opgrip.traces.schema.arguments import DTYPES

_PRECISIONS = ("highest", "high", "medium")


@contextmanager
def restored(settings: Mapping[str, Any]) -> Iterator[None]:
    """The block runs under a context's settings; those that this torch or machine has not are left as they are.

    Autocast is not among them: calls are captured below it, with their arguments as it made them.
    """
    with ExitStack() as stack:
        for name, value in settings.items():
            if name in _SETTERS:
                with suppress(ValueError, TypeError, RuntimeError, OverflowError):
                    _SETTERS[name](stack, value)
        _deterministic(stack, settings)
        if settings.get("inference") is True:
            # never with False, which would turn gradients on
            stack.enter_context(torch.inference_mode())
        yield


def _set(read: Callable[[], Any], write: Callable[[Any], Any], stack: ExitStack, value: Any) -> None:
    before = read()
    if value != before:
        stack.callback(write, before)
        write(value)


def _deterministic(stack: ExitStack, settings: Mapping[str, Any]) -> None:
    on, warn_only = settings.get("deterministic") is True, settings.get("deterministic_warn_only") is True
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if (on, warn_only) != before:
        stack.callback(torch.use_deterministic_algorithms, before[0], warn_only=before[1])
        torch.use_deterministic_algorithms(on, warn_only=warn_only)


def _precision(stack: ExitStack, value: Any) -> None:
    if value in _PRECISIONS:
        _set(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, stack, value)


def _fp32_precisions(stack: ExitStack, value: Any) -> None:
    for place, precision in parse_precisions(str(value)).items():
        with suppress(AttributeError, RuntimeError):
            _set(partial(read_precision, place), partial(set_precision, place), stack, precision)


def _threads(stack: ExitStack, value: Any) -> None:
    if type(value) is int and 0 < value <= (os.cpu_count() or 1):
        _set(torch.get_num_threads, torch.set_num_threads, stack, value)


def _default_dtype(stack: ExitStack, value: Any) -> None:
    dtype = DTYPES.get(str(value))
    if dtype is not None and dtype.is_floating_point:
        _set(torch.get_default_dtype, torch.set_default_dtype, stack, dtype)


def _cudnn(attribute: str) -> Callable[[ExitStack, Any], None]:
    def apply(stack: ExitStack, value: Any) -> None:
        if isinstance(value, bool) and torch.backends.cudnn.is_available():
            cudnn = torch.backends.cudnn
            _set(lambda: getattr(cudnn, attribute), lambda setting: setattr(cudnn, attribute, setting), stack, value)

    return apply


_SETTERS: dict[str, Callable[[ExitStack, Any], None]] = {
    "matmul_precision": _precision,
    "fp32_precision": _fp32_precisions,
    "threads": _threads,
    "default_dtype": _default_dtype,
    "cudnn": _cudnn("enabled"),
    "cudnn_benchmark": _cudnn("benchmark"),
    "cudnn_deterministic": _cudnn("deterministic"),
    "cudnn_tf32": _cudnn("allow_tf32"),
}
