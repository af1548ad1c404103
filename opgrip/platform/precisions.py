"""Where torch lets a program say how exactly float32 is computed, since torch 2.9.

Once one of these was set, torch's older settings for all places raise when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch

from opgrip.errors import raise_if_from_program

PLACES = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
"""Below `torch.backends`."""
VALUES = ("none", "ieee", "tf32", "bf16")
USUAL = {"cudnn.conv": ("tf32",), "cudnn.rnn": ("tf32",)}
"""What places have from the start, where that is not `none`, which comes to `ieee`."""

_READERS = {place: attrgetter(f"{place}.fp32_precision") for place in PLACES}
_OLDER = {"cuda.matmul": "cuda.matmul.allow_tf32", "cudnn.conv": "cudnn.allow_tf32", "cudnn.rnn": "cudnn.allow_tf32"}
"""Settings of torch before 2.9."""


def read_precision(place: str) -> str | None:
    """How exactly a place computes; None where this torch does not say."""
    try:
        value: str = _READERS[place](torch.backends)
    except (AttributeError, RuntimeError) as error:
        raise_if_from_program(error)
        return None
    return value


def allows_tf32(place: str) -> bool:
    """Whether a place on a GPU may multiply float32 as TF32."""
    value = read_precision(place)
    if value is not None:
        return value == "tf32"
    try:
        return bool(attrgetter(_OLDER[place])(torch.backends))
    except (AttributeError, RuntimeError):
        return False


def set_precision(place: str, value: Any) -> None:
    """Have a place compute so; raises what torch does where it cannot."""
    attrgetter(place)(torch.backends).fp32_precision = value


def is_tf32(operator: str, context: Mapping[str, Any]) -> bool:
    """Whether a GPU may compute an operator on float32 as TF32, under the settings of a context.

    Convolutions and recurrent networks have settings of their own, which allow it unless a program says otherwise;
    units and samples may have some of either kind.
    """
    values = parse_precisions(str(context.get("fp32_precision", "")))
    of_products = "tf32" if context.get("matmul_precision") in ("high", "medium") else "ieee"
    in_products = values.get("cuda.matmul", of_products) == "tf32"
    by_cudnn = "tf32" if context.get("cudnn_tf32", True) else "ieee"
    in_cudnn = {
        word: values.get(place, by_cudnn) == "tf32" if context.get("cudnn", True) else in_products
        for word, place in (("conv", "cudnn.conv"), ("rnn", "cudnn.rnn"))
    }
    if not operator.startswith("aten."):
        return in_products or any(in_cudnn.values())
    return next((allowed for word, allowed in in_cudnn.items() if word in operator), in_products)


def describe_precisions() -> str:
    """Those that are not as they usually are: `cuda.matmul:tf32,mkldnn.conv:bf16`."""
    values = {place: read_precision(place) for place in PLACES}
    unusual = {
        place: value for place, value in values.items() if value not in (None, *USUAL.get(place, ("none", "ieee")))
    }
    return ",".join(f"{place}:{value}" for place, value in unusual.items())


def parse_precisions(text: str) -> dict[str, str]:
    """The values by place of what `describe_precisions` gave, without those that torch does not know."""
    pairs = (part.partition(":") for part in text.split(","))
    return {place: value for place, _, value in pairs if place in PLACES and value in VALUES}
