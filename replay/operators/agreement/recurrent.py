"""Layers that go over time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from opgrip.replay.operators.agreement.sizes import Call, Sizes, dtypes, elements, is_tensor, shape_of, shapes


def rnn(call: Call) -> Iterator[Sizes]:
    """An LSTM's layer; others have no kernel of this."""
    inputs, hidden = shape_of(call["input"]), call["hidden_size"]
    places = (0, 1, 2, 3) if "weight0" in call else (1, 2, 3, 4)
    first, second, *biases = (f"weight{place}" for place in places)
    yield "mode", call["mode"], 2
    yield "dimensions of input", len(inputs), 3
    yield from shapes(call, (4 * hidden, inputs[2]), first)
    yield from shapes(call, (4 * hidden, hidden), second)
    if call["has_biases"]:
        yield from shapes(call, (4 * hidden,), *biases)
    yield from elements(call, inputs[1] * hidden, "hx_", "cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy")
    yield from shapes(call, (*inputs[:2], hidden), "output", "grad_output")
    tensors = (name for name, value in call.items() if is_tensor(value) and name != "workspace")
    yield from dtypes(call, call["input"].dtype, *tensors)
    if "workspace" in call:
        yield from dtypes(call, torch.uint8, "workspace")
        yield from shapes(call, _workspace(call), "workspace")


def _workspace(call: Call) -> tuple[int, ...]:
    """The shape of what the forward leaves for its backward, which depends on the processor."""
    forward = torch.ops.aten.mkldnn_rnn_layer.default
    renamed = {**{f"weight{place}": f"weight{place + 1}" for place in range(4)}, "cx_": "cx_tmp"}
    call = {**call, "train": True}
    arguments = (call[renamed.get(argument.name, argument.name)] for argument in forward._schema.arguments)
    on_zeros = (torch.zeros(shape_of(value), dtype=value.dtype) if is_tensor(value) else value for value in arguments)
    # without gradients the forward leaves nothing
    with torch.enable_grad():
        return shape_of(forward(*on_zeros)[3])
