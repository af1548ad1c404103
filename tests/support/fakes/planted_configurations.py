"""Iterator and generator of operator configurations, registered by another package."""

from typing import Any

import torch

from opgrip.traces.formats.configurations.generators import ArgumentDraw, Arguments, generators
from opgrip.traces.formats.configurations.iterators import Listed, ValueChoices, iterators
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.values.exact import Constant


@iterators.register("PowersOfTwo")
def expand(entry: dict[str, Any]) -> ValueChoices:
    return Listed([{"size": 1 << power} for power in range(entry["powers"])])


@generators.register("planted:Ones")
def generate(entry: dict[str, Any], draw: ArgumentDraw) -> Arguments:
    size = entry["size"]
    ones = TensorSpec((size,), (1,), torch.float32, draw.device, values=draw.number_of(Constant(1.0)))
    return Arguments((ones, draw.chance.randint(1, 9)))
