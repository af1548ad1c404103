"""Conversion of arguments and tensor values of an untrusted trace to Python source."""

from __future__ import annotations

import base64
import math
import textwrap
import zlib
from collections.abc import Callable, Collection, Iterable
from math import isfinite, prod
from typing import Any

import torch

from opgrip.errors import UserError
from opgrip.traces.schema.arguments import DTYPES, LAYOUTS, MEMORY_FORMATS, GeneratorSpec, TensorSpec
from opgrip.traces.schema.tensor_specs import plain_name
from opgrip.traces.values import Drawable, value_models
from opgrip.traces.values.exact import Booleans, Constant, OneHot, elements
from opgrip.traces.values.floats import DIGITS, PROBABILITIES, Floats
from opgrip.traces.values.integers import Integers
from opgrip.traces.values.order import Permutation
from opgrip.traces.values.progression import Progression

DEVICE = "device"  # name of the variable of a script that holds its device
WIDTH = 110


class Literals:
    def __init__(self, tensor: Callable[[TensorSpec], str], main_device: str) -> None:
        self._tensor = tensor
        self._kind = main_device.partition(":")[0]

    def device(self, name: str) -> str:
        return DEVICE if name.partition(":")[0] == self._kind or name != "cpu" else '"cpu"'

    def of(self, value: Any) -> str:
        match value:
            case TensorSpec():
                return self._tensor(value)
            case torch.Size():
                return f"torch.Size({list(map(int, value))!r})"
            case list():
                return f"[{', '.join(map(self.of, value))}]"
            case tuple():
                return f"({', '.join(map(self.of, value))}{',' if len(value) == 1 else ''})"
            case dict():
                return f"{{{', '.join(f'{self.of(key)}: {self.of(item)}' for key, item in value.items())}}}"
            case torch.device():
                return f"torch.device({self.device(str(value))})"
            case GeneratorSpec(where, seed):
                return f"torch.Generator({self.device(where)}).manual_seed({int(seed)})"
        return plain(value)


def plain(value: Any) -> str:
    match value:
        case None | bool() | int():
            return repr(value)
        case float():
            return _float(value)
        case complex():
            return f"complex({_float(value.real)}, {_float(value.imag)})"
        case str():
            return ascii(value)
        case torch.dtype() if plain_name(value) in DTYPES:
            return f"torch.{plain_name(value)}"
        case torch.layout() if plain_name(value) in LAYOUTS:
            return f"torch.{plain_name(value)}"
        case torch.memory_format() if plain_name(value) in MEMORY_FORMATS:
            return f"torch.{plain_name(value)}"
    raise UserError(f"a script cannot contain an argument of type {type(value).__name__}", "replay it with opreplay")


def _float(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "math.nan" if math.isnan(value) else f"{'-' if value < 0 else ''}math.inf"


def sizes(numbers: Iterable[int]) -> str:
    return plain_tuple([repr(int(number)) for number in numbers])


def plain_tuple(items: list[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def comment(text: object) -> str:
    """Return a text from a trace in a form that is safe inside a comment."""
    return ascii(str(text)[:200])[1:-1]


FEW = 64  # maximum number of values that a script contains as literals
LITERAL_BYTES = 1 << 16  # maximum number of bytes of a tensor with structured values that a script contains in full
# maximum number of bytes of a tensor that a script contains in full because its values decide the size of a result
DECIDING_BYTES = 1 << 22
SAMPLE_BYTES = 1 << 15  # number of bytes of a larger tensor that a script contains; it repeats these rows
# number of last dimensions that are repeated together, by value model, if it is not 1
TAIL = {"factorable": 2, "triangular": 2}
LINE = 100
SEED = 0
INDENT = " " * 8


class ValueSource:
    def __init__(self, dtypes: Collection[torch.dtype]) -> None:
        self._dtypes = dtypes
        self.helpers: set[str] = set()
        self.is_exact = True

    def of(self, model: Drawable | None, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        count = prod(shape)
        if model is None:
            return self._unknown(shape, dtype)
        if count <= FEW and dtype in _PLAIN:
            return self._few(model, shape, dtype)
        decide = dtype in self._dtypes
        limit = DECIDING_BYTES if decide else LITERAL_BYTES
        writer = _WRITERS.get(type(model))
        nbytes = count * dtype.itemsize
        exactly_drawn = isinstance(model, Constant | Booleans | Progression)
        if writer is None or not (exactly_drawn or nbytes > limit or (writer is _floats and not decide)):
            if nbytes <= limit:
                return self._data(self._draw(model, shape, dtype), shape, dtype)
            self.is_exact &= not decide
            return self._sampled(model, shape, dtype)
        self.is_exact &= exactly_drawn or not decide
        if dtype.is_complex and isinstance(model, Floats):
            return f"torch.view_as_complex({_floats(self, model, (*shape, 2), dtype.to_real())})"
        return writer(self, model, shape, dtype)

    def _unknown(self, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        if dtype.is_complex or dtype.is_floating_point:
            wide = torch.complex64 if dtype.is_complex else torch.float32
            return f"torch.randn({sizes(shape)}, dtype={wide}).to({dtype})"
        return f"torch.zeros({sizes(shape)}, dtype={dtype})"

    def _few(self, model: Drawable, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        values = self._draw(model, shape, dtype).reshape(-1).tolist()
        source = _list([_short(value, dtype) for value in values])
        reshaped = "" if len(shape) == 1 else f".reshape({sizes(shape)})"
        return f"torch.tensor({source}, dtype={dtype}){reshaped}"

    def _draw(self, model: Drawable, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return model.draw(shape, dtype, torch.Generator().manual_seed(SEED))
        except (RuntimeError, ValueError, IndexError, OverflowError, NotImplementedError) as error:
            raise UserError("no values can be drawn from the value model of a tensor", str(error)[:100]) from error

    def _data(self, values: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, function: str = "data") -> str:
        self.helpers.add(function)
        content = values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        text = base64.b64encode(zlib.compress(content, 9)).decode()
        lines = "\n".join(f'{INDENT}"{line}"' for line in textwrap.wrap(text, LINE))
        of_sample = f"{sizes(values.shape)}, " if function == "sampled" else ""
        return f"{function}(\n{lines},\n{INDENT}{dtype}, {of_sample}{sizes(shape)},\n    )"

    def _sampled(self, model: Drawable, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        name = next((key for key, kind in value_models.items() if kind is type(model)), "")
        tail = shape[max(0, len(shape) - TAIL.get(name, 1)) :] if len(shape) > 1 else ()
        if prod(tail) * dtype.itemsize > DECIDING_BYTES:
            raise UserError(
                "the values of one of the tensors cannot be generated by a script, which would have to contain "
                f"more than {DECIDING_BYTES >> 20} MB of them",
                "replay the case with opreplay",
            )
        rows = max(1, min(prod(shape[: len(shape) - len(tail)]), SAMPLE_BYTES // (prod(tail) * dtype.itemsize)))
        return self._data(self._draw(model, (rows, *tail), dtype), shape, dtype, "sampled")


def _floats(source: ValueSource, model: Floats, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    work = dtype if dtype == torch.float64 else torch.float32
    spread = model.spread
    if model.shape == "quantiles" and model.quantiles is not None:
        source.helpers.add("by_quantiles")
        numbers = f"{list(PROBABILITIES)!r}, {list(map(float, model.quantiles))!r}"
        text = f"by_quantiles({sizes(shape)}, {work}, {numbers})"
    elif model.shape == "uniform" and isfinite(spread.high - spread.low):
        text = f"(torch.rand({sizes(shape)}, dtype={work}) * {spread.high - spread.low!r} + {plain(float(spread.low))})"
    else:
        text = f"(torch.randn({sizes(shape)}, dtype={work}) * {plain(float(spread.std))} + {plain(float(spread.mean))})"
    text += f".clamp({plain(float(spread.low))}, {plain(float(spread.high))})"
    text += ".round()" if model.whole else ""
    text = _with_shares(source, model, text, prod(shape), work)
    text += _order(model, shape)
    return text if work == dtype else f"{text}.to({dtype})"


def _with_shares(source: ValueSource, model: Floats, text: str, count: int, work: torch.dtype) -> str:
    small = f"torch.finfo({work}).tiny / 2"
    shares = (
        *(("0.0", model.zeros), ("math.nan", model.nan), ("math.inf", model.inf), ("-math.inf", model.minus_inf)),
        (small, model.denormals),
    )
    counts = [f"({value}, {round(share * count)})" for value, share in shares if round(share * count)]
    if not counts:
        return text
    source.helpers.add("mixed")
    return f"mixed({text}, [{', '.join(counts)}])"


def _order(model: Any, shape: tuple[int, ...]) -> str:
    if model.rises is None or model.falls is None:
        return ""
    downwards = ", descending=True" if model.falls > model.rises else ""
    if model.by_row and len(shape) > 1:
        return f".sort(dim=-1{downwards}).values"
    if min(model.rises, model.falls) or model.rises == model.falls:
        return ""
    return f".reshape(-1).sort(dim=0{downwards}).values.reshape({sizes(shape)})"


def _constant(source: ValueSource, model: Constant, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    value = elements([model.value], dtype, torch.device("cpu"))
    text = plain((value.float() if dtype.is_floating_point and dtype.itemsize == 1 else value).item())
    return f"torch.full({sizes(shape)}, {text}, dtype={dtype})"


def _booleans(source: ValueSource, model: Booleans, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    count = prod(shape)
    true = model.true if count == model.total else round(model.true * count / model.total)
    return f"(torch.randperm({count}) < {true}).reshape({sizes(shape)}){'' if dtype == torch.bool else f'.to({dtype})'}"


def _progression(source: ValueSource, model: Progression, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    indices = f"(torch.arange({prod(shape)}) // {model.repeats} % {model.period})"
    whole = type(model.start) is type(model.step) is int
    values = f"({indices}{'' if whole else '.double()'} * {model.step!r} + {model.start!r})"
    return f"{values}.to({dtype}).reshape({sizes(shape)})"


def _integers(source: ValueSource, model: Integers, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    source.helpers.add("whole_numbers")
    count, fitted = prod(shape), model.others + sum(times for _, times in model.frequent)
    frequent = [(int(value), int(times) * count // fitted) for value, times in model.frequent]
    if model.low is None or model.high is None:
        low = high = frequent[0][0]
    else:
        low, high = model.low, min(model.high, (1 << 63) - 2)
    text = f"whole_numbers({sizes(shape)}, {dtype}, {frequent!r}, {low}, {high})"
    if model.rises is None and model.ascending:
        return f"{text}.reshape(-1).sort().values.reshape({sizes(shape)})"
    return text + _order(model, shape)


def _permutation(source: ValueSource, model: Permutation, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    width = model.high - model.low + 1
    return f"(torch.randperm({prod(shape)}) % {width} + {model.low}).to({dtype}).reshape({sizes(shape)})" + _order(
        model, shape
    )


def _one_hot(source: ValueSource, model: OneHot, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    classes = shape[-1] if shape else 1
    return f"torch.nn.functional.one_hot(torch.randint({classes}, {sizes(shape[:-1])}), {classes}).to({dtype})"


# dtypes of tensors that torch can create from lists of numbers
_PLAIN = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
# functions that return torch expressions which draw values like a value model, by model
_WRITERS: dict[type, Callable[[ValueSource, Any, tuple[int, ...], torch.dtype], str]] = {
    Floats: _floats,
    Constant: _constant,
    Booleans: _booleans,
    Progression: _progression,
    Integers: _integers,
    Permutation: _permutation,
    OneHot: _one_hot,
}


def _short(value: Any, dtype: torch.dtype) -> str:
    if dtype.is_floating_point and dtype.itemsize <= 4 and isfinite(value):
        value = float(f"{value:.{DIGITS}g}")
    return plain(value)


def _list(items: list[str]) -> str:
    text = f"[{', '.join(items)}]"
    if len(text) <= LINE - len(INDENT):
        return text
    lines = textwrap.wrap(", ".join(items), LINE, break_long_words=False, break_on_hyphens=False)
    return "\n".join(["[", *(f"{INDENT}{line}" for line in lines), "    ]"])
