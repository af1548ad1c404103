"""Operators that take functions, such as `torch.cond` and `flex_attention`: the calls that they make are recorded too.

torch takes a dispatch mode off while an operator runs, and so while the functions run that such an operator is given.
The mode is put back on here around the operator's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.thread_mode import ThreadMode
from opgrip.capture.signatures.predictions import Entry, Node
from opgrip.capture.torch_compat.higher_order_private import own_code
from opgrip.traces.schema.arguments import Opaque
from opgrip.traces.schema.records import FUNCTION, HIGHER_ORDER


def higher_order_node(
    recorder: Recorder,
    mode: ThreadMode,
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: int,
) -> Node | None:
    """The node of a call of such an operator, whose `op` records what the operator calls.

    None where another mode or a subclass of the program runs the operator, and inside an extension's function or a
    compiled region, which stand for all that they call.

    Parameters
    ----------
    tensors : how many the call takes
    """
    if mode.place.inside is not None and not mode.place.gripped:
        return None
    code = own_code(func, args, kwargs)
    if code is None:
        return None
    name = HIGHER_ORDER + func.name()
    positional = [_without_functions(value) for value in args]
    named = {key: _without_functions(value) for key, value in kwargs.items()}
    number = recorder.signature(name, FUNCTION, positional, named)
    scope, pair = recorder.scopes.point(number, mode.place, tensors + 1)
    node = Node(Entry(number, func), (), scope, pair, None)
    node.op = _recording(recorder, mode, node, name, code)
    return node


def _recording(
    recorder: Recorder, mode: ThreadMode, node: Node, name: str, code: Callable[..., Any]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        mode.enter(node, recorder.places.inside(mode.place, name, True))
        try:
            with mode:
                return code(*args, **kwargs)
        finally:
            mode.leave(node)

    return run


def _without_functions(value: Any) -> Any:
    """An argument with a word for each function: that of the next call is another object, made of the same code."""
    if isinstance(value, tuple | list):
        items = [_without_functions(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {name: _without_functions(item) for name, item in value.items()}
    return Opaque("function") if callable(value) and not isinstance(value, torch.Tensor | type) else value
