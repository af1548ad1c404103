"""The mode `aot`: torch.export and AOTInductor, a shared library that runs without Python."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opgrip.replay.modes.mode import Program, Task, mode

if TYPE_CHECKING:
    import torch

PACKAGE = "model.pt2"


@mode("aot")
def with_aotinductor(task: Task) -> Program:
    from opgrip.replay.modes.conversions.tensor_calls import exported
    from opgrip.replay.operators.torch_private import packaged

    program, call = exported(task, in_place=True)
    with tempfile.TemporaryDirectory() as nowhere:
        package = (task.store or Path(nowhere)) / PACKAGE
        must_compile = not package.exists()
        run = packaged(program, str(package), make=must_compile)

    def function(*tensors: torch.Tensor) -> Any:
        return run(list(tensors))

    return Program(function, call.enter, call.leave, in_place=task.mutates, note="" if must_compile else "loaded")
