"""What traces of the zoo hold together: each operator and function counts once, in however many traces it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from opgrip.traces.zoo import ZooTrace, zoo_file
from opgrip.zoo.making.recording import longtail_functions


@dataclass(frozen=True, slots=True)
class Distinct:
    """Counts over traces.

    Attributes
    ----------
    traces : that were loaded: all that have been made
    operators : functions of extensions among them
    extension_functions : such as those of mmcv
    longtail : functions that the finder names
    """

    traces: int
    operators: int
    extension_functions: int
    longtail: int


def count_distinct(traces: Iterable[ZooTrace]) -> Distinct:
    """Load what has been made of the traces, one after the other, and count."""
    from opgrip.traces import load
    from opgrip.traces.schema.records import EXTENSION, FUNCTION
    from opgrip.traces.table.profiler_labels import is_mark

    made = [trace for trace in traces if trace.recording is not None]
    operators: dict[str, str] = {}
    functions: set[tuple[str, str]] = set()
    for trace in made:
        content = load(zoo_file(trace))
        for item in content.signatures:
            if item.kind != FUNCTION and not is_mark(item.op):
                operators[item.op] = item.kind
        functions |= longtail_functions([content])
    extensions = sum(kind == EXTENSION for kind in operators.values())
    return Distinct(len(made), len(operators), extensions, len(functions))
