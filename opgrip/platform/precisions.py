"""Precision of float32 operators, which programs can set for each backend since torch 2.9.

Once a program changes one of these settings, reading torch's older global settings raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any

import torch

from opgrip.errors import raise_if_from_program
from opgrip.platform.private_apis import PrivatePlaces

PLACES = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
"""paths of the settings relative to `torch.backends`"""
VALUES = ("none", "ieee", "tf32", "bf16")
USUAL = {"cudnn.conv": ("tf32",), "cudnn.rnn": ("tf32",)}
"""initial values that differ from `none`, which means full float32 precision (`ieee`)"""

_places = PrivatePlaces()
private_places = _places.report

_getter = _places.take(
    "torch._C._get_fp32_precision_getter",
    None,
    "precisions are read through Python objects, 20 times as slowly",
)
_READERS: Mapping[str, Callable[[], str]] = {
    place: partial(attrgetter(f"{place}.fp32_precision"), torch.backends)
    if _getter is None
    else partial(_getter, *place.replace("cudnn", "cuda").split("."))
    for place in PLACES
}
_OLDER = {"cuda.matmul": "cuda.matmul.allow_tf32", "cudnn.conv": "cudnn.allow_tf32", "cudnn.rnn": "cudnn.allow_tf32"}
"""equivalent settings of torch before 2.9"""


def read_precision(place: str) -> str | None:
    """Return the precision setting of a backend, or None if this version of torch lacks it."""
    try:
        return _READERS[place]()
    except (AttributeError, RuntimeError) as error:
        raise_if_from_program(error)
        return None


def allows_tf32(place: str) -> bool:
    """Return True if a GPU backend may multiply float32 as TF32."""
    value = read_precision(place)
    if value is not None:
        return value == "tf32"
    try:
        return bool(attrgetter(_OLDER[place])(torch.backends))
    except (AttributeError, RuntimeError):
        return False


def set_precision(place: str, value: Any) -> None:
    """Set the precision of a backend. torch raises an error if that is not possible."""
    attrgetter(place)(torch.backends).fp32_precision = value


def is_tf32(operator: str, context: Mapping[str, Any]) -> bool:
    """Return True if a GPU may compute a float32 operator as TF32, under the recorded settings in `context`.

    Convolutions and recurrent networks have separate settings, which allow TF32 by default. A subgraph case or a sample
    may contain all kinds of operators, so any of the settings that allows TF32 counts.
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
    """Return the precision settings that differ from torch's defaults, such as `cuda.matmul:tf32,mkldnn.conv:bf16`."""
    return _describe(tuple(map(read_precision, PLACES)))


@lru_cache(maxsize=64)
def _describe(values: tuple[str | None, ...]) -> str:
    unusual = {
        place: value
        for place, value in zip(PLACES, values, strict=True)
        if value not in (None, *USUAL.get(place, ("none", "ieee")))
    }
    return ",".join(f"{place}:{value}" for place, value in unusual.items())


def parse_precisions(text: str) -> dict[str, str]:
    """Return the settings in a text of the form that `describe_precisions` returns, by name, without unknown
    settings.
    """
    pairs = (part.partition(":") for part in text.split(","))
    return {place: value for place, _, value in pairs if place in PLACES and value in VALUES}
