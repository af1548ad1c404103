"""An exported call as a function of jax, which torchax makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._ops import OpOverloadPacket

from opgrip.replay.operators import Unsupported
from opgrip.traces.errors import one_line

VALUES_NEEDED = ("ConcretizationTypeError", "TracerBoolConversionError", "NonConcreteBooleanIndexError")
"""What jax raises where the shape of something hangs on values, by the ends of the classes' names."""


def as_jax(program: torch.export.ExportedProgram) -> tuple[Any, Callable[[Any, Any], Any]]:
    """A program's constants, and a function that takes them and the program's inputs.

    Raises
    ------
    Unsupported : where torchax cannot convert it
    """
    import jax

    # else what torch has in 64 bits comes back in 32
    jax.config.update("jax_enable_x64", True)
    with _importable():
        import torchax
        import torchax.export

        # reads the tables of operators
        torchax.default_env()
    try:
        states, function = torchax.export.exported_program_to_jax(program)
    except Exception as error:
        raise Unsupported(f"torchax cannot convert it: {reason(error)}") from error
    return states, function


def reason(error: Exception) -> str:
    """What an error of torchax or jax says, without the places of its own code and the advice."""
    if type(error).__name__ in VALUES_NEEDED:
        return "shapes in it hang on values"
    lines = str(error).strip().splitlines()
    if isinstance(error, AssertionError) and lines and lines[0].startswith("aten."):
        return f"no function for {lines[0]}"
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else one_line(error)


@contextmanager
def _importable() -> Iterator[None]:
    """Let torchax be imported, and undo what that changes in torch.

    Its tables name overloads that later versions of torch removed: a placeholder, which no program calls, stands in
    their place. It declares a backend of torch, for tensors that are not used here; replaces some decompositions, which
    other compilers would then take; and turns a fast path of attention off.
    """
    find = OpOverloadPacket.__getattr__

    def find_or_stand_in(packet: OpOverloadPacket, name: str) -> Any:
        try:
            return find(packet, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return object()

    tables = torch._decomp.global_decomposition_table
    kept = {kind: dict(table) for kind, table in tables.items()}
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        with ExitStack() as patches:
            patches.enter_context(patch.object(OpOverloadPacket, "__getattr__", find_or_stand_in))
            patches.enter_context(patch.object(torch.utils, "rename_privateuse1_backend"))
            patches.enter_context(patch.object(torch, "_register_device_module"))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for kind, table in tables.items():
            table.clear()
            table.update(kept[kind])
