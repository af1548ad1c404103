"""Programs that run single operators of torch, such as `opinfo:all`, `opinfo:unary`, `opinfo:nn.functional.relu`."""

from __future__ import annotations

from importlib import import_module

from opgrip.capture.models.program import ModelOptions, ModelProgram, ModelSource, model_sources
from opgrip.cli.output_files import check_writable
from opgrip.errors import UserError, cause_of
from opgrip.platform.machine import check_device

PREFIX = "opinfo:"


def load_operators(text: str, options: ModelOptions) -> ModelProgram:
    """Build the program that runs sample calls of operators, one operator per step."""
    import torch

    from opgrip.capture.models.operators.operators_program import operators_program

    request = options.operators
    device = check_device(options.device)
    if request.uncovered is not None:
        check_writable(request.uncovered, force=False)
    for name in request.import_:
        _import(name)
    names = [name for name in text.removeprefix(PREFIX).split(",") if name]
    if not names:
        raise UserError(f"{text} names no operators", "opinfo:all has all, opinfo:unary has one category")
    return operators_program(text, names, str(device), torch.initial_seed(), request)


def _import(name: str) -> None:
    try:
        import_module(name)
    except Exception as error:
        raise UserError(f"{name} cannot be imported", cause_of(error)) from error


model_sources.register("opinfo")(
    ModelSource(
        form="opinfo:all, opinfo:unary or opinfo:add for single operators of torch",
        matches=lambda text: text.startswith(PREFIX),
        load=load_operators,
        lacks=("modules",),
        hint="leave it out with --model opinfo:NAME",
    )
)
