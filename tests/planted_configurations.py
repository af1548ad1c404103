"""An iterator and a generator of operator configurations of another package than opgrip."""

from __future__ import annotations

from typing import Any

import torch

from opgrip.traces.formats.configurations.generators import Arguments, Draw, generators
from opgrip.traces.formats.configurations.iterators import iterators
from opgrip.traces.formats.configurations.value_choices import Choices, Listed
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.values.exact import Constant


@iterators.register("PowersOfTwo")
def expand(entry: dict[str, Any]) -> Choices:
    return Listed([{"size": 1 << power} for power in range(entry["powers"])])


@generators.register("planted:Ones")
def generate(entry: dict[str, Any], draw: Draw) -> Arguments:
    size = entry["size"]
    ones = TensorSpec((size,), (1,), torch.float32, draw.device, values=draw.number_of(Constant(1.0)))
    return Arguments((ones, draw.chance.randint(1, 9)))
