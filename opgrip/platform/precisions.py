"""Reduced precision of float32 operators, such as TF32, which programs can set for each backend since torch 2.9."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any

import torch

from opgrip.errors import raise_if_from_program
from opgrip.platform.private_apis import PrivatePlaces

# paths of the settings relative to `torch.backends`
PLACES = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
VALUES = ("none", "ieee", "tf32", "bf16")
# initial values that differ from `none`, which means full float32 precision (`ieee`)
USUAL = {"cudnn.conv": ("tf32",), "cudnn.rnn": ("tf32",)}

_places = PrivatePlaces()
private_places = _places.report

_getter = _places.take(
    "torch._C._get_fp32_precision_getter", None, "precisions are read through Python objects, 20 times as slowly"
)
_READERS: Mapping[str, Callable[[], str]] = {
    place: partial(attrgetter(f"{place}.fp32_precision"), torch.backends)
    if _getter is None
    else partial(_getter, *place.replace("cudnn", "cuda").split("."))
    for place in PLACES
}
# equivalent settings of torch before 2.9
_OLDER = {"cuda.matmul": "cuda.matmul.allow_tf32", "cudnn.conv": "cudnn.allow_tf32", "cudnn.rnn": "cudnn.allow_tf32"}


def read_precision(place: str) -> str | None:
    try:
        return _READERS[place]()
    except (AttributeError, RuntimeError) as error:
        raise_if_from_program(error)
        return None


def allows_tf32(place: str) -> bool:
    """Return True if the program's settings allow a GPU backend to compute float32 operators as TF32."""
    value = read_precision(place)
    if value is not None:
        return value == "tf32"
    try:
        return bool(attrgetter(_OLDER[place])(torch.backends))
    except (AttributeError, RuntimeError):
        return False


def set_precision(place: str, value: Any) -> None:
    attrgetter(place)(torch.backends).fp32_precision = value


def is_tf32(operator: str, context: Mapping[str, Any]) -> bool:
    """Return True if a GPU may compute a float32 operator as TF32, given the settings recorded with the call."""
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
    """Return the settings that differ from torch's defaults, as a text such as `cuda.matmul:tf32,mkldnn.conv:bf16`."""
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
    """Return the precisions in a text of `describe_precisions`, by the name of the setting."""
    pairs = (part.partition(":") for part in text.split(","))
    return {place: value for place, _, value in pairs if place in PLACES and value in VALUES}
