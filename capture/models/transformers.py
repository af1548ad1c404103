"""Models of the package transformers, from their configs: `transformers:BertForMaskedLM`, `transformers:bert`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from opgrip.capture.models.factory import train_step
from opgrip.capture.models.program import GENERATE, LOSS, NEW_TOKENS, PREDICT, RUNS, ModelOptions, Program, load_weights
from opgrip.capture.models.source import ModelSource, model_sources
from opgrip.capture.models.transformers_configs import EXTRA, find_class, make_config
from opgrip.capture.models.transformers_inputs import make_inputs
from opgrip.cli.plugins import needed
from opgrip.errors import UserError, cause_of
from opgrip.platform.machine import check_device, free_memory

if TYPE_CHECKING:
    import torch
    from torch import nn

PREFIX = "transformers:"
LEARNING_RATE = 1e-5


def load_transformer(text: str, options: ModelOptions) -> Program:
    """The program of an architecture, with random weights where no checkpoint is given; nothing is downloaded.

    Raises
    ------
    UserError : where there is no such architecture, its config cannot be made so, or the package is missing
    """
    package = needed("transformers", EXTRA)
    # else it tells what its defaults are
    package.logging.set_verbosity_error()
    device = check_device(options.device)
    found = find_class(text.removeprefix(PREFIX))
    if options.run == GENERATE and not found.can_generate():
        raise UserError(f"{found.__name__} writes no text", "choose --run predict, loss or train")
    if options.new_tokens is not None and options.run != GENERATE:
        raise UserError("--new-tokens is for --run generate", f"leave it out with --run {options.run}")
    config = make_config(found, options.cfg_options, _sizes(options))
    model = _build(found, config)
    if options.checkpoint is not None:
        load_weights(model, options.checkpoint)
    model.to(device)
    inputs = make_inputs(model, options)
    return Program(
        name=text.removeprefix(PREFIX),
        model=model,
        inputs=lambda: copy.deepcopy(inputs),
        step=_step(model, options),
        details={
            "source": text,
            "class": found.__name__,
            "cfg_options": list(options.cfg_options),
            "packages": {"transformers": package.__version__},
        },
    )


def _sizes(options: ModelOptions) -> dict[str, Any]:
    """Settings of a config that follow from the options of inputs."""
    if options.input_size is None:
        return {}
    height, width = options.input_size
    return {"image_size": height if height == width else [height, width]}


def _build(found: type[Any], config: Any) -> nn.Module:
    size, room = weight_bytes(found, config), free_memory("cpu")
    if size is not None and room is not None and size > room:
        problem = f"{found.__name__} has {size / 1e9:.1f} GB of weights, and {room / 1e9:.1f} GB of memory are free"
        raise UserError(problem, "make it smaller, as with --cfg-options num_hidden_layers=2")
    try:
        model: nn.Module = found(config)
    except Exception as error:
        raise UserError(f"{found.__name__} cannot be built", cause_of(error, 300)) from error
    return model


def weight_bytes(found: type[Any], config: Any) -> int | None:
    """How much memory the weights of a model take, without taking it; None where that cannot be said."""
    import torch

    try:
        with torch.device("meta"):
            model = found(copy.deepcopy(config))
    except Exception:
        # some compute with their weights while they are made
        return None
    return sum(int(parameter.numel() * parameter.element_size()) for parameter in model.parameters())


def _step(model: Any, options: ModelOptions) -> Callable[[Any], Any]:
    import torch

    if options.run == PREDICT:
        model.eval()
        return torch.no_grad()(lambda inputs: model(**inputs))
    if options.run == GENERATE:
        model.eval()
        count = options.new_tokens or NEW_TOKENS
        return torch.no_grad()(lambda inputs: _generate(model, inputs, count))
    model.train()
    if options.run == LOSS:
        return lambda inputs: loss_of(model(**inputs))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return train_step(lambda inputs: loss_of(model(**inputs)), optimizer)


def _generate(model: Any, inputs: dict[str, Any], count: int) -> Any:
    """The most likely text, of exactly `count` more tokens: first the whole text, then a token at a time."""
    # the end of a text is no token that a random model knows, so each step is of the same length
    return model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, num_beams=1)


def loss_of(output: Any) -> torch.Tensor:
    """The loss that a model returned; the mean of the first thing that it returned, where that is none.

    Raises
    ------
    UserError : where nothing of it can be trained on
    """
    import torch
    from torch.utils._pytree import tree_leaves

    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss if loss.dim() == 0 else loss.mean()
    values = list(output.values()) if hasattr(output, "values") else output
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return value.float().mean()
    raise UserError("the model returned nothing to train on", "choose --run predict")


model_sources.register("transformers")(
    ModelSource(
        form="transformers:BertForMaskedLM or transformers:bert, with random weights",
        matches=lambda text: text.startswith(PREFIX),
        load=load_transformer,
        runs=RUNS,
        takes=("sequence_length", "new_tokens"),
    )
)
