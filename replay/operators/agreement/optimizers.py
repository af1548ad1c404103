"""Steps of optimizers over lists of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from opgrip.replay.operators.agreement.sizes import Call, Sizes, elements, shape_of


def optimizer(call: Call) -> Iterator[Sizes]:
    """Lists of tensors with one for each parameter, some of which may be empty."""
    expected = [shape_of(parameter) for parameter in call["self"]]
    needed = {"grads", "exp_avgs", "exp_avg_sqs", "state_sums", "state_steps"}
    if call.get("amsgrad"):
        needed.add("max_exp_avg_sqs")
    if call.get("momentum"):
        needed.add("momentum_buffer_list")
    for name in sorted(needed | {"max_exp_avg_sqs", "momentum_buffer_list"}):
        if name not in call or (not call[name] and name not in needed):
            continue
        yield name, len(call[name]), len(expected)
        for tensor, shape in zip(call[name], expected, strict=False):
            yield name, *((prod(shape_of(tensor)), 1) if name == "state_steps" else (shape_of(tensor), shape))
    yield from elements(call, 1, "lr", "grad_scale", "found_inf")
