"""Images made larger or smaller."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from opgrip.replay.operators.agreement.sizes import Call, Sizes, shape_of, shapes


def upsample(call: Call) -> Iterator[Sizes]:
    """Scales by which the output is about as large as it is, in as many dimensions as it has."""
    if "output_size" not in call or "input" in call:
        # this overload computes the one from the other
        return
    input_size = tuple(call["input_size"]) if "input_size" in call else shape_of(call["self"])
    output_size = tuple(call["output_size"])
    yield "input", len(input_size), len(output_size) + 2
    yield from shapes(call, (*input_size[:2], *output_size), "grad_output")
    names = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}[len(output_size)]
    for name, before, after in zip(names, input_size[2:], output_size, strict=True):
        scale = call.get(name)
        if scale is not None and not (isfinite(scale) and scale > 0 and abs(before * scale - after) <= 1):
            yield name, scale, f"about {after}/{before}"
