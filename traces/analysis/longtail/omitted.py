"""Functions that are not worth gripping, although they break into many small operators."""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from opgrip.traces.analysis.longtail.calls import BACKWARD, Function, MadeCall, function_of
from opgrip.traces.analysis.longtail.commands import is_script
from opgrip.traces.table.trace import Trace

CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
INITIALIZERS = ("reset_parameters", "init_weights", "_init_weights")
LOADING = re.compile(r"(Dataset|Loader)\w*\.|collate", re.IGNORECASE)
"""Names of functions that load data."""
WHOLE, OWN = 0.8, 0.5
"""A function that is called once contains the program if it lasts for this share of it, and makes at most this share of
its calls itself."""


@dataclass(slots=True)
class _Span:
    """When a function's calls began and ended, and how many there were.

    Attributes
    ----------
    last_forward_ns : start of its last call outside of a backward pass, -1 if there is none
    """

    first_ns: int
    last_ns: int
    calls: int = 0
    last_forward_ns: int = -1


class Spans:
    """When the functions of a thread ran, from the first of their operators to the last."""

    def __init__(self) -> None:
        self._spans: dict[Function, _Span] = {}
        self._first_backward_ns: int | None = None

    def note(self, call: MadeCall) -> None:
        """Take note of the thread's next call."""
        end = call.start_ns + call.duration_ns
        span = self._spans.setdefault(function_of(call), _Span(call.start_ns, end))
        span.first_ns, span.last_ns = min(span.first_ns, call.start_ns), max(span.last_ns, end)
        span.calls += 1
        if call.place is None or call.place.phase != BACKWARD:
            span.last_forward_ns = call.start_ns
        elif self._first_backward_ns is None:
            self._first_backward_ns = call.start_ns

    def containing(self, counts: Mapping[Function, int]) -> set[Function]:
        """Return the functions that contain the calls of the thread: called once, and others run within them.

        Parameters
        ----------
        counts : how often each function was called
        """
        spans = self._spans.values()
        calls = sum(span.calls for span in spans)
        whole = max((span.last_ns for span in spans), default=0) - min((span.first_ns for span in spans), default=0)
        return {
            function
            for function, span in self._spans.items()
            if counts.get(function) == 1
            and span.last_ns - span.first_ns >= WHOLE * whole
            and span.calls <= OWN * calls
            # a backward pass has calls of functions that have returned
            and span.last_forward_ns >= (self._first_backward_ns or 0)
        }


def models_forward(trace: Trace) -> set[Function]:
    """Return the `forward` of the models that the program calls: each contains a step."""
    return {
        (scope.file, scope.function)
        for scope in trace.scopes
        if not scope.module and scope.module_type and scope.function.endswith(f"{scope.module_type}.forward")
    }


def constructors(trace: Trace, counts: Mapping[Function, int]) -> set[Function]:
    """Return the constructors of modules, and those that the program calls once.

    Parameters
    ----------
    counts : how often each function was called
    """
    module_types = {scope.module_type for scope in trace.scopes}
    return {
        (file, name)
        for (file, name), count in counts.items()
        if name.rpartition(".")[2] in CONSTRUCTORS and (count == 1 or name.split(".")[-2:][0] in module_types)
    }


def reason_to_omit(
    header: Mapping[str, Any], function: Function, building: Container[Function], containing: Container[Function]
) -> str | None:
    """Return why a function is not worth gripping; None if it is.

    Parameters
    ----------
    building : constructors that build the model
    containing : functions that contain the program or a step of it
    """
    file, name = function
    if function in building or name.rpartition(".")[2] in INITIALIZERS:
        return "builds the model"
    if LOADING.search(name):
        return "loads data"
    if function in containing or (name == "main" and is_script(file, header)):
        return "the program or a step"
    # a script may have the name of one of Python's modules
    is_library = file.partition("/")[0].removesuffix(".py") in sys.stdlib_module_names
    return "Python's library" if is_library and not is_script(file, header) else None
