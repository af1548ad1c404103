"""Times functions on inputs that are given here, as a replay times the calls of a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor

from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.functions import function_case
from opgrip.replay.checks import Tolerance
from opgrip.replay.measuring.measure import measure_cases
from opgrip.replay.measuring.results import Result
from opgrip.replay.modes import ModeOptions, Tuning
from opgrip.replay.operators.devices import DeviceLostError, facts_of, use_device
from opgrip.replay.options import make_parser, plan_of
from opgrip.replay.outcome import Results
from opgrip.replay.timing import pages
from opgrip.replay.timing.caches import WARM
from opgrip.replay.timing.options import Effort, TimingOptions
from opgrip.replay.workers.job import settings_for
from opgrip.traces.devices import check_device
from opgrip.traces.errors import UserError, in_words_of_python
from opgrip.traces.keywords import arguments_of
from opgrip.traces.options import words_in
from opgrip.traces.progress import QuietReporter
from opgrip.traces.words import counted

OPTIONS = ("device", "dtype", "seed", "threads", *words_in(ModeOptions, Tuning, Tolerance, TimingOptions, Effort))
"""Options of a replay that say how a case is run and timed."""

Inputs = Mapping[str, Any] | Sequence[Any]


def benchmark(
    function: Callable[..., Any] | Sequence[Callable[..., Any]], inputs: Sequence[Inputs], **options: Any
) -> Results:
    """Time a function, or several on the same inputs.

    ::

        benchmark(torch.add, [{"self": (1024, 1024), "other": (1024, 1024)}], backward=True).frame
        benchmark([mine, torch.nn.functional.gelu], [[(8, 512)], [(64, 512)]], mode=["eager", "compile"])

    They run in this process, since a function cannot be handed to another: one that crashes ends it. A row is a
    function on inputs under a mode, whose results are compared with those of eager. With glibc this
    process keeps what it frees meanwhile, and gets no huge pages on request. Both end with the call; what remains is
    that glibc no longer adjusts its thresholds (32 and 64 MB from then on), and that threads may share one arena.

    Parameters
    ----------
    inputs : of each case, by position in a list or by name in a dictionary: a tuple of ints is the shape of a float32
        tensor of normal random numbers; a tensor on the device `meta` stands for one of its shape, strides and dtype;
        all else is passed as it is
    options : of `opreplay --help`, by their long names with `_` for `-`, those that say how cases are run and timed

    Raises
    ------
    TypeError : for an option that there is not
    UserError : for values that an option does not take
    """
    functions = list(function) if isinstance(function, Sequence) else [function]
    if not functions or not inputs:
        raise UserError("there is nothing to time", "give a function, and inputs of a case or more")
    with in_words_of_python():
        args = arguments_of(make_parser(), ["benchmark"], options, only=OPTIONS)
        args.cache = args.cache or (WARM,)
        device = check_device(args.device or "cpu")
        args.device = str(device)
        use_device(args.device)
        settings = settings_for(plan_of(args))
    numbers = count()
    cases = [_case(item, case_inputs, next(numbers), args) for case_inputs in inputs for item in functions]
    doing = f"timing {counted(len(cases), 'case')} on {device}"
    with pages.keeping_freed_memory(), QuietReporter("opgrip").doing(doing, len(cases)) as advance:
        rows_of_case: dict[int, list[Result]] = {}
        try:
            for rows in measure_cases(cases, settings):
                rows_of_case[rows[0].case] = rows
                advance()
        except DeviceLostError as error:
            raise UserError(f"{device} serves this process no more: {error}", "start Python anew without it") from error
    in_order = [row for number in sorted(rows_of_case) for row in rows_of_case[number]]
    header = {"torch": torch.__version__, "device": str(device), "seed": args.seed}
    return Results(in_order, header | facts_of(args.device))


def _case(function: Callable[..., Any], inputs: Inputs, number: int, args: Any) -> Case:
    generator = torch.Generator().manual_seed(args.seed)

    def argument_of(value: Any) -> Any:
        if isinstance(value, tuple) and all(type(size) is int for size in value):
            tensor = torch.randn(value, generator=generator)
        elif isinstance(value, Tensor) and value.is_meta:
            tensor = _like(value, generator)
        else:
            return value
        return tensor.to(args.device).requires_grad_(bool(args.backward) and tensor.is_floating_point())

    by_name = inputs if isinstance(inputs, Mapping) else {}
    # torch's own functions call so what their schema calls self
    other_names = {"self": "input"} if isinstance(function, BuiltinFunctionType) else {}
    kwargs = {other_names.get(name, name): argument_of(value) for name, value in by_name.items()}
    positional = [] if isinstance(inputs, Mapping) else [argument_of(value) for value in inputs]
    return function_case(function, positional, kwargs, _name(function), number)


def _like(meta: Tensor, generator: torch.Generator) -> Tensor:
    """A tensor of random numbers where `meta` says floating point, of zeros and ones where bool, else of zeros."""
    tensor = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
    if meta.is_floating_point():
        return tensor.copy_(torch.randn(meta.shape, generator=generator))
    if meta.dtype is torch.bool:
        return tensor.copy_(torch.rand(meta.shape, generator=generator) < 0.5)
    return tensor.zero_()


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    module = getattr(function, "__module__", None) or ("torch" if getattr(torch, name, None) is function else "")
    return f"{module}.{name}" if module and module != "__main__" else name
