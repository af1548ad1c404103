"""Benchmark functions on inputs that are given here, as a replay times the calls of a trace."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor

from opgrip.cli.command import counted
from opgrip.cli.options import arguments_of, from_arguments, words_in
from opgrip.cli.progress import QuietReporter
from opgrip.errors import UserError, in_words_of_python
from opgrip.platform.machine import check_device
from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.functions import FunctionTrial, function_case, try_function
from opgrip.replay.checks import Tolerance
from opgrip.replay.checks.reference import in_order_of, not_comparable, other_structure
from opgrip.replay.modes import ModeOptions, Tuning
from opgrip.replay.operators.devices import DeviceLostError, facts_of, use_device
from opgrip.replay.operators.lookup import Operator
from opgrip.replay.outcome import Results
from opgrip.replay.outputs import check_output
from opgrip.replay.replay_options import OutputOptions, make_parser, options_of, run_settings
from opgrip.replay.reports.fulfilment import unfulfilled
from opgrip.replay.results.ratios import ratio_over
from opgrip.replay.results.results import OF_MODE, SETTINGS, WAY, WRONG, Result
from opgrip.replay.run.measure import measure_cases
from opgrip.replay.run.unmeasured_rows import empty_rows
from opgrip.replay.run.workload import Workload, workload_for
from opgrip.replay.timing import pages
from opgrip.replay.timing.timing_options import WARM, Effort, TimingOptions

OPTIONS = (
    *("device", "dtype", "seed", "threads", "output", "force"),
    *words_in(ModeOptions, Tuning, Tolerance, TimingOptions, Effort),
)
"""Options of a replay that say how a case is run and timed, and where the results go."""
NAMESPACES = ("torch", "torch.nn", "torch.nn.functional", "torch.special", "torch.linalg", "torch.fft")
"""Where torch has its functions under the names that users call them by, which are not those of their modules."""

Inputs = Mapping[str, Any] | Sequence[Any]


def benchmark(
    function: Callable[..., Any] | Iterable[Callable[..., Any]], inputs: Sequence[Inputs], **options: Any
) -> Results:
    """Time a function, or compare several on the same inputs: their results with the first one's, and their times.

    ::

        benchmark(torch.add, [{"self": (1024, 1024), "other": (1024, 1024)}], backward=True).frame
        print(benchmark([torch.nn.functional.gelu, my_gelu], [[(8, 512)], [(64, 512)]], mode=["eager", "compile"]))

    A row is a function on inputs under a mode. Of a single function, other modes are compared with eager. Of several,
    the first is the reference, in eager: a row whose results differ from its results beyond the tolerance is `wrong`,
    with the place and size of the difference, and `ratio` is the row's median time divided by the reference's. A
    function may write into its inputs: each gets copies of its own.

    The functions run in this process, since a function cannot be handed to another: one that crashes ends it. With
    glibc this process keeps what it frees meanwhile, and gets no huge pages on request. Both end with the call; what
    remains is that glibc no longer adjusts its thresholds (32 and 64 MB from then on), and that threads may share one
    arena.

    Parameters
    ----------
    inputs : of each case, by position in a list or by name in a dictionary: a tuple of ints is the shape of a float32
        tensor of normal random numbers; a tensor on the device `meta` stands for one of its shape, strides and dtype;
        all else is passed as it is
    options : of `opreplay --help`, by their long names with `_` for `-`: those that say how cases are run and timed,
        and `output`, `force`

    Raises
    ------
    TypeError : for an option that there is not
    UserError : for values that an option does not take
    """
    functions = [function] if callable(function) else list(function)
    _check(functions, inputs)
    with in_words_of_python():
        args = arguments_of(make_parser(), ["benchmark"], options, only=OPTIONS)
        args.cache = args.cache or (WARM,)
        device = check_device(args.device or "cpu")
        args.device = str(device)
        use_device(args.device)
        output = from_arguments(OutputOptions, args)
        check_output(output, args)
        workload = replace(workload_for(options_of(args)), memory=True)
    names = _distinct(map(_name, functions))
    numbers = count()
    contenders = [
        contender
        for case_inputs in inputs
        for contender in _contenders(dict(zip(names, functions, strict=True)), case_inputs, args, numbers)
    ]
    rows = _measured(contenders, workload, device)
    header = {"torch": torch.__version__, "device": str(device), "seed": args.seed, SETTINGS: run_settings(args)}
    results = Results(rows, header | facts_of(args.device))
    for line in unfulfilled(args, rows):
        warnings.warn(line, stacklevel=2)
    if output.output is not None:
        results.save(output.output, output.force)
    return results


def _check(functions: Sequence[object], inputs: object) -> None:
    """Raise UserError unless there are functions, and a list of lists or dictionaries of their arguments."""
    if not functions:
        raise UserError("no function to time", "pass a function or a list of functions")
    for function in functions:
        if not callable(function):
            raise UserError(f"expected functions to time, got {type(function).__name__}", "pass a list of functions")
    if not isinstance(inputs, Sequence) or not inputs:
        raise UserError("expected a list with the inputs of each case", "for example [[(8, 512)], [(64, 512)]]")
    for case_inputs in inputs:
        if isinstance(case_inputs, str) or not isinstance(case_inputs, Mapping | Sequence):
            raise UserError(
                f"expected a list or dictionary of arguments for each case, got {type(case_inputs).__name__}",
                "put the arguments of a case in a list: [[x], [y]]",
            )


@dataclass(frozen=True, slots=True)
class _Contender:
    """One function on one set of inputs.

    Attributes
    ----------
    reference : number of the case of the first function on these inputs
    fault : why its results are wrong, known before it is timed
    note : for its rows
    """

    case: Case
    reference: int
    fault: str = ""
    note: str = ""


def _contenders(
    functions: Mapping[str, Callable[..., Any]], inputs: Inputs, args: Any, numbers: Iterator[int]
) -> Iterator[_Contender]:
    """Yield the functions on one set of inputs, the reference first."""
    reference: Callable[..., Any] | None = None
    expected = FunctionTrial(writes=False)
    number_of_reference = -1
    for name, function in functions.items():
        positional, kwargs = _arguments(function, inputs, args)
        trial = try_function(function, (positional, kwargs))
        case = function_case(function, positional, kwargs, name, next(numbers), trial)
        if reference is None:
            reference, expected, number_of_reference = function, trial, case.number
            yield _Contender(case, case.number)
            continue
        if trial.failed:
            yield _Contender(case, number_of_reference)
            continue
        odd = not_comparable([expected.results, trial.results])
        fault = None if expected.failed or odd else other_structure(trial.results, expected.results)
        if expected.failed or odd or fault:
            note = "not compared: " + (f"there is a {odd} among the results" if odd else "the reference failed")
            yield _Contender(case, number_of_reference, fault or "", "" if fault else note)
        else:
            right = Operator(_called_as(reference, function, trial.results), expected.writes)
            yield _Contender(replace(case, reference=right), number_of_reference)


def _called_as(reference: Callable[..., Any], candidate: Callable[..., Any], results: Any) -> Callable[..., Any]:
    """Return the reference with a candidate's keywords, and with its order of the entries of dictionaries."""
    theirs = {new: old for old, new in _other_names(candidate).items()}
    ours = _other_names(reference)

    def call(*args: Any, **kwargs: Any) -> Any:
        named = {theirs.get(name, name): value for name, value in kwargs.items()}
        return in_order_of(reference(*args, **{ours.get(name, name): value for name, value in named.items()}), results)

    return call


def _measured(contenders: Sequence[_Contender], workload: Workload, device: Any) -> list[Result]:
    """Return the rows of all functions, in their order."""
    rows_of_case = {
        item.case.number: list(empty_rows(item.case, workload, WRONG, item.fault).values())
        for item in contenders
        if item.fault
    }
    cases = [item.case for item in contenders if not item.fault]
    doing = f"timing {counted(len(cases), 'case')} on {device}"
    with pages.keeping_freed_memory(), QuietReporter("opgrip").doing(doing, len(cases)) as advance:
        try:
            for rows in measure_cases(cases, workload):
                rows_of_case[rows[0].case] = rows
                advance()
        except DeviceLostError as error:
            raise UserError(f"{device} serves this process no more: {error}", "start Python anew without it") from error
    compared = []
    for item in contenders:
        base = {_way(row): row for row in rows_of_case[item.reference] if row.mode == workload.request.modes.reference}
        for row in rows_of_case[item.case.number]:
            if item.note:
                row = replace(row, note=", ".join(filter(None, (row.note, item.note))))
            is_candidate = item.case.number != item.reference
            compared.append(_over(row, base.get(_way(row))) if is_candidate else row)
    return compared


def _way(row: Result) -> tuple[object, ...]:
    return tuple(getattr(row, name) for name in WAY if name not in OF_MODE)


def _over(row: Result, base: Result | None) -> Result:
    """Return a candidate's row with its time over that of the reference."""
    ratio = None if base is None else ratio_over(row, base)
    return replace(row, ratio=ratio, ratio_p10=None, ratio_p50=None, ratio_p90=None)


def _arguments(function: Callable[..., Any], inputs: Inputs, args: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a function is called with, the same values for each function."""
    generator = torch.Generator().manual_seed(args.seed)

    def argument_of(value: Any) -> Any:
        if isinstance(value, tuple) and all(type(size) is int for size in value):
            tensor = torch.randn(value, generator=generator)
        elif isinstance(value, Tensor) and value.is_meta:
            tensor = _like(value, generator)
        else:
            return value
        return tensor.to(args.device).requires_grad_(bool(args.backward) and tensor.is_floating_point())

    if not isinstance(inputs, Mapping):
        return tuple(argument_of(value) for value in inputs), {}
    names = _other_names(function)
    return (), {names.get(name, name): argument_of(value) for name, value in inputs.items()}


def _other_names(function: Callable[..., Any]) -> dict[str, str]:
    """Return what torch's own functions call the arguments of their schema."""
    return {"self": "input"} if isinstance(function, BuiltinFunctionType) else {}


def _like(meta: Tensor, generator: torch.Generator) -> Tensor:
    """A tensor of random numbers where `meta` says floating point, of zeros and ones where bool, else of zeros."""
    tensor = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
    if meta.is_floating_point():
        return tensor.copy_(torch.randn(meta.shape, generator=generator))
    if meta.dtype is torch.bool:
        return tensor.copy_(torch.rand(meta.shape, generator=generator) < 0.5)
    return tensor.zero_()


def _name(function: Callable[..., Any]) -> str:
    """Return the name that users call a function by: `torch.nn.functional.gelu`, not `torch._C._nn.gelu`."""
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(function)
    if isinstance(function, partial):
        return f"partial({_name(function.func)})"
    named: Any = function if hasattr(function, "__name__") else type(function)
    name: str = named.__name__
    for namespace in NAMESPACES:
        public = name.removeprefix(f"{namespace.rpartition('.')[2]}_")
        if getattr(sys.modules.get(namespace), public, None) is named:
            return f"{namespace}.{public}"
    module = getattr(named, "__module__", None) or ""
    return f"{module}.{name}" if module and module != "__main__" else name


def _distinct(names: Iterable[str]) -> list[str]:
    """Return names that tell functions apart: `mine`, `mine (2)`."""
    taken: list[str] = []
    for name in names:
        same = (name if number == 1 else f"{name} ({number})" for number in count(1))
        taken.append(next(candidate for candidate in same if candidate not in taken))
    return taken
