"""What a model source gives: a module and the step that is captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

RUNS = ("predict", "loss", "train")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What the user asked of a model.

    Attributes
    ----------
    run : `predict`, `loss` (its forward alone) or `train` (loss, backward and optimizer step)
    batch_size, input_size : number of images and their height and width in pixels; None for the source's own
    checkpoint : file of weights, None for random ones
    cfg_options : `key=value` settings of an OpenMMLab config
    """

    run: str = "predict"
    batch_size: int | None = None
    input_size: tuple[int, int] | None = None
    device: str = "cpu"
    checkpoint: Path | None = None
    cfg_options: tuple[str, ...] = ()


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
