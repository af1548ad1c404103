"""What a model source gives: a module and the step that is captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opgrip.traces.command import positive
from opgrip.traces.option_types import image_size
from opgrip.traces.options import option, titled

if TYPE_CHECKING:
    from torch import nn

RUNS = ("predict", "loss", "train")


@titled("the model")
@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What the user asked of a model."""

    run: str = option(
        "predict",
        "loss is its forward alone, train is loss, backward and optimizer step (default: %(default)s)",
        choices=RUNS,
        only=("models",),
    )
    batch_size: int | None = option(None, "default: the model's own", parse=positive, metavar="N", only=("models",))
    input_size: tuple[int, int] | None = option(
        None,
        "of images, in pixels, such as 800x1333 (default: the model's own)",
        parse=image_size,
        metavar="HxW",
        only=("models",),
    )
    device: str = option("cpu", "where the model runs, such as cuda:0 (default: %(default)s)", only=("models",))
    checkpoint: Path | None = option(
        None, "weights to load (default: random ones)", parse=Path, metavar="FILE", only=("models",)
    )
    cfg_options: tuple[str, ...] = option(
        (), "settings that override an OpenMMLab config's", several=True, metavar="KEY=VALUE", only=("models",)
    )


@dataclass(frozen=True, slots=True)
class Program:
    """A model that is ready to run.

    Attributes
    ----------
    name : short, fit for a file name
    model : the module that module paths begin at
    inputs : makes the inputs of one step, the same each time; a step may change what it is given
    step : runs the model once on such inputs
    details : what the trace's header says of it
    """

    name: str
    model: nn.Module
    inputs: Callable[[], Any]
    step: Callable[[Any], Any]
    details: Mapping[str, Any] = field(default_factory=dict)
