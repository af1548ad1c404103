"""All that capture takes from torch's private interfaces, which may change from version to version.

Seen in torch 2.13; a name that another version lacks is replaced by what comes nearest, or by nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType

import torch


def _no_node() -> None:
    return None


current_autograd_node: Callable[[], object | None] = getattr(torch._C, "_current_autograd_node", _no_node)
"""The node that the autograd engine runs in this thread; None outside a backward pass."""


def hide_from_compiler(function: FunctionType) -> bool:
    """Keep torch.compile from tracing a function and all that it calls; False where this torch has no means to.

    What a dispatch mode runs inside a compiled region is else compiled with it. torch's own means, a guard around the
    mode's handler, does the same at each call, for half the cost of an empty mode.
    """
    frames = torch._C._dynamo.eval_frame
    try:
        skip = frames._FrameAction.SKIP
        strategy = frames._FrameExecStrategy(skip, skip)
        frames.set_code_exec_strategy(function.__code__, strategy)
    except (AttributeError, TypeError):
        return False
    return True


@contextmanager
def unobserved() -> Iterator[None]:
    """Let the tensor operations of the block pass by every mode and subclass, ours and the program's."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def storage_identity(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage object: the same for all tensors that live in the same memory."""
    identity: int = tensor.untyped_storage()._cdata
    return identity
