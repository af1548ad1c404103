"""Ranges: where one starts and ends is the program's, and how many numbers it has decides a shape."""

from __future__ import annotations

from typing import Any, TypeAlias

from opgrip.traces.analysis.redaction.calls import argument_name
from opgrip.traces.analysis.redaction.numbers import coarse
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import OPERATOR, Signature

RANGES = ("aten.arange.", "aten.range.")
"""How the names of operators begin that make ranges, the last of which has its end too."""
STARTS, ENDS, STEP = "start", "end", "step"

Images: TypeAlias = dict[int | str, Any]


def range_images(signature: Signature) -> Images:
    """A range's numbers by their places in the call: from zero on, as many as there were, in coarse steps.

    Nothing for another call, and for one whose output is not known.
    """
    places: list[tuple[int | str, Any]] = [*enumerate(signature.args), *signature.kwargs.items()]
    numbers = {argument_name(signature.op, place)[0]: (place, value) for place, value in places}
    output, (_, step) = signature.outputs, numbers.get(STEP, (None, 1))
    is_range = signature.kind == OPERATOR and signature.op.startswith(RANGES)
    if not is_range or not isinstance(output, TensorSpec) or len(output.shape) != 1 or not _is_number(step):
        return {}
    step = coarse(step)
    count = output.shape[0] - signature.op.startswith(RANGES[1])
    images = {STARTS: 0, ENDS: step * count, STEP: step}
    # a float stays one: it decides the dtype
    return {
        place: float(images[name]) if isinstance(value, float) else images[name]
        for name, (place, value) in numbers.items()
        if name in images and _is_number(value)
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
