"""`benchmark()`: times Python functions on given inputs, in the same way as a replay times the calls of a trace."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opgrip.cli.command import counted, unique_name
from opgrip.cli.options import words_in
from opgrip.cli.progress import QuietReporter, Reporter
from opgrip.errors import UserError, in_words_of_python
from opgrip.platform.machine import check_device
from opgrip.replay.analyses.candidates import print_judgement
from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.functions import FunctionTrial, function_case, try_function
from opgrip.replay.cases.selection import PROGRAM
from opgrip.replay.command.job import job_from_keywords
from opgrip.replay.command.replay import replay, run_job
from opgrip.replay.command.replay_kind import unfulfilled
from opgrip.replay.command.run_requests import check_output, options_of
from opgrip.replay.command.trace_replay import repeat
from opgrip.replay.inputs.input_options import InputOptions
from opgrip.replay.modes import CANDIDATE, ModeOptions, Tuning
from opgrip.replay.modes.candidate import CandidateOptions, candidate_of
from opgrip.replay.operators.devices import DeviceLostError, facts_of, is_accelerator, use_device
from opgrip.replay.operators.lookup import Operator
from opgrip.replay.reports import OutputOptions
from opgrip.replay.reports.outcome import Results
from opgrip.replay.results.judgement import JudgedStep, judged_steps, mean_saving
from opgrip.replay.results.ratios import ratio_over
from opgrip.replay.results.results import MODE_COLUMNS, SETTINGS, VARIANT_COLUMNS, WRONG, Result
from opgrip.replay.run.checks.reference import in_order_of, not_comparable, other_structure
from opgrip.replay.run.checks.verdicts import Tolerance
from opgrip.replay.run.measure import CachedRows, measure_cases
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.worker import LocalExecutor
from opgrip.replay.run.workload import Workload, empty_rows, workload_for
from opgrip.replay.timing import pages
from opgrip.replay.timing.timing_options import WARM, Effort, TimingOptions

if TYPE_CHECKING:
    import pandas as pd

EXCLUDED = ("strict", "list", "candidate", "candidates", "gate")  # options of opreplay that `judge` does not take


@dataclass(frozen=True, slots=True, repr=False)
class Judgement:
    """The result of `judge`: whether candidates (implementations of operators) are right, and how much time they save.

    results : rows of the operators and of the candidates
    """

    results: Results

    @property
    def frame(self) -> pd.DataFrame:
        """Data frame with the rows of the candidates; its columns include `verdict` and `step_saving`."""
        return Results([row for row in self.results if row.mode == CANDIDATE], self.results.header).frame

    @property
    def steps(self) -> list[JudgedStep]:
        """The time that candidates save in the step of each trace."""
        return judged_steps(self.results)

    @property
    def step_saving(self) -> float | None:
        """Share of the captured time of a step that the candidates save, negative if they are slower; the mean over
        models if there are several traces.

        None if the calls belong to no step, as for samples.
        """
        mean = mean_saving(self.steps)
        return None if mean is None else mean.saving

    @property
    def is_right(self) -> bool:
        """True if no candidate failed or returned wrong results or gradients."""
        return all(not step.broken for step in self.steps)

    def __str__(self) -> str:
        table = io.StringIO()
        print_judgement(self.results.rows, table)
        return table.getvalue()

    def __repr__(self) -> str:
        lines = "; ".join(f"{step.trace}: {step.line}" if step.trace else step.line for step in self.steps)
        return f"<Judgement: {lines}>"


def judge(
    candidates: Mapping[str, Callable[..., Any] | str], trace: str | Path | Sequence[str | Path], **options: Any
) -> Judgement:
    """Judge implementations of operators or modules on the recorded calls of traces, as `opreplay --candidate` does.

    ::

        verdict = judge({"aten._softmax.default": softmax}, "train.jsonl")
        verdict.frame[["shapes", "verdict", "ratio"]]
        verdict.step_saving

    Functions run in this process, because functions cannot be sent to another process; a function that crashes ends
    this process. Name functions as text, `my_kernels.py:softmax`, to run them in separate processes.

    candidates : by the full name of the operator, such as `aten._softmax.default`: any callable that takes the
        operator's arguments, such as a function, an operator of `torch.library` or a compiled function. With
        `unit="module"`, by the path of a module, such as `module:backbone.layer1.*`: a class below `nn.Module`, an
        instance of such a class, or a function that takes the tensors of the recorded module in the order of their
        first use
    trace : one or several traces, a folder of traces, `zoo` or `zoo:PATTERN`
    options : long names of options in `opreplay --help`, with `_` for `-`, except `candidate`,
        `gate`, `list` and `strict`

    Raises TypeError if an option is unknown, or if the candidates are neither all callable nor all text.

    Raises UserError if the value of an option is invalid, or if the traces contain no call of these operators.
    """
    if not candidates:
        raise UserError("no candidate to judge", "pass a dictionary such as {'aten._softmax.default': softmax}")
    texts = [f"{op}={function}" for op, function in candidates.items() if isinstance(function, str)]
    if len(texts) == len(candidates):
        return Judgement(replay(trace, candidate=texts, **options))
    functions = {op: function for op, function in candidates.items() if callable(function)}
    if len(functions) < len(candidates):
        raise TypeError("candidates must all be functions, or all be text such as my_kernels.py:softmax")
    with in_words_of_python(), pages.keeping_freed_memory():
        job = job_from_keywords(trace, options, excluded=EXCLUDED)
        candidates_here = tuple(candidate_of(op, function) for op, function in functions.items())
        return Judgement(run_job(job.having(CandidateOptions, candidate=candidates_here), _ThisProcess()))


class _ThisProcess(LocalExecutor):
    def compile(self, workload: Workload, done: Collection[int], reporter: Reporter, may_fork: bool) -> CachedRows:
        return {}

    def run(
        self, workload: Workload, done: Collection[int], cached_rows: CachedRows, may_fork: bool
    ) -> Iterator[list[Result]]:
        cases = [case for case in workload.cases if case.number not in done]
        return measure_cases(cases, workload, workload.surroundings)


# replay options that decide how a case runs, how it is timed, and where the results go
OPTIONS = (
    *("device", "dtype", "seed", "threads", "output", "force"),
    *words_in(ModeOptions, Tuning, Tolerance, TimingOptions, Effort),
)
# namespaces from which users import torch functions; the functions themselves are defined in other modules
NAMESPACES = ("torch", "torch.nn", "torch.nn.functional", "torch.special", "torch.linalg", "torch.fft")

Inputs = Mapping[str, Any] | Sequence[Any]


def benchmark(
    function: Callable[..., Any] | Iterable[Callable[..., Any]], inputs: Sequence[Inputs], **options: Any
) -> Results:
    """Time a function, or compare the results and times of several functions on the same inputs.

    ::

        benchmark(torch.add, [{"self": (1024, 1024), "other": (1024, 1024)}], backward=True).frame
        print(benchmark([torch.nn.functional.gelu, my_gelu], [[(8, 512)], [(64, 512)]], mode=["eager", "compile"]))

    Each row is one function on one input set in one variant: a mode, a number of threads, a cache state. A single
    function's other modes are compared with eager. With several functions, the first one in eager is the reference: a
    row whose results differ from it by more than the tolerance has the status `wrong` and reports the size and place of
    the difference, and `ratio` is the row's median time divided by the reference's. Functions may write into their
    inputs, because each gets its own copies.

    The functions run in this process, because functions cannot be sent to another process; a function that crashes ends
    this process; `repeats` run in it, too. With glibc, it keeps freed memory and does not request huge pages during the
    benchmark. Afterwards glibc still does not adjust its thresholds (32 and 64 MB), and threads may share one arena.

    inputs : arguments of each case, as a list (by position) or a dictionary (by name). A tuple of ints is the shape of
        a float32 tensor of normal random numbers; a tensor on the device `meta` gets values for its shape, strides and
        dtype; all other values are passed unchanged
    options : long names of options in `opreplay --help`, with `_` for `-`: those that decide how cases run and how they
        are timed, and also `output` and `force`

    Raises TypeError if an option is unknown.

    Raises UserError if the value of an option is invalid, `inputs` has another form, or a function makes the device
    unusable.
    """
    functions = [function] if callable(function) else list(function)
    _check(functions, inputs)
    with in_words_of_python():
        job = job_from_keywords("benchmark", options, only=OPTIONS)
        device = check_device(job[InputOptions].device or "cpu")
        job = job.having(TimingOptions, cache=job[TimingOptions].cache or (WARM,))
        job = job.having(InputOptions, device=str(device))
        use_device(str(device))
        check_output(job)
        workload = replace(workload_for(options_of(job)), memory=True)
        workload.timing.check_device(str(device))
        _refuse_useless(options, workload, len(functions))
    names: list[str] = []
    for function in functions:
        names.append(unique_name(_name(function), names))
    numbers = count()
    contenders = [
        contender
        for case_inputs in inputs
        for contender in _contenders(dict(zip(names, functions, strict=True)), case_inputs, workload.request, numbers)
    ]
    rows = _measured(contenders, workload, device)
    seed, output = job[InputOptions].seed, job[OutputOptions]
    header = {"torch": torch.__version__, "device": str(device), "seed": seed, SETTINGS: job.settings}
    results = Results(rows, header | facts_of(str(device)))
    for line in unfulfilled(job, rows):
        warnings.warn(line, stacklevel=2)
    if output.output is not None:
        results.save(output.output, output.force)
    return results


def _check(functions: Sequence[object], inputs: object) -> None:
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


def _refuse_useless(options: Mapping[str, Any], workload: Workload, functions: int) -> None:
    request, has_clock = workload.request, is_accelerator(workload.device)
    compares = functions > 1 or len(request.modes.all_names) > 1
    reasons = {
        "force": "" if options.get("output") else "no output is written",
        "clock_warmup": "" if has_clock else f"the clock of {workload.device} is not raised",
        **dict.fromkeys(("rtol", "atol"), "" if compares else "nothing is compared"),
        "precision": "" if request.effort.iterations is None else "iterations is given",
        "cache": "a function follows no calls of a program" if PROGRAM in workload.timing.caches else "",
    }
    for name, reason in reasons.items():
        if reason and options.get(name):
            raise UserError(f"{name}={options[name]!r} has no effect, because {reason}", "leave it out")


@dataclass(frozen=True, slots=True)
class _Contender:
    case: Case
    reference: int  # case number of the first function on the same inputs
    fault: str = ""  # why the results are wrong, if this is known before timing
    note: str = ""


def _contenders(
    functions: Mapping[str, Callable[..., Any]], inputs: Inputs, request: RunRequest, numbers: Iterator[int]
) -> Iterator[_Contender]:
    reference: Callable[..., Any] | None = None
    expected = FunctionTrial(writes=False)
    number_of_reference = -1
    for name, function in functions.items():
        positional, kwargs = _arguments(function, inputs, request)
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
    theirs = {new: old for old, new in _other_names(candidate).items()}
    ours = _other_names(reference)

    def call(*args: Any, **kwargs: Any) -> Any:
        named = {theirs.get(name, name): value for name, value in kwargs.items()}
        return in_order_of(reference(*args, **{ours.get(name, name): value for name, value in named.items()}), results)

    return call


def _measured(contenders: Sequence[_Contender], workload: Workload, device: Any) -> list[Result]:
    rows_of_case = {
        item.case.number: list(empty_rows(item.case, workload, WRONG, item.fault).values())
        for item in contenders
        if item.fault
    }
    cases = [item.case for item in contenders if not item.fault]
    effort, reference = workload.request.effort, workload.request.modes.reference
    doing = f"timing {counted(len(cases), 'case')} on {device}"
    with pages.keeping_freed_memory(), QuietReporter("opgrip").doing(doing, effort.repeats * len(cases)) as advance:

        def run_once(numbers: Collection[int], _: str) -> dict[int, list[Result]]:
            rows_by_number = {}
            for rows in measure_cases([case for case in cases if case.number in numbers], workload):
                rows_by_number[rows[0].case] = rows
                advance()
            return rows_by_number

        try:
            first = run_once({case.number for case in cases}, "")
            rows_of_case |= repeat(first, run_once, effort.repeats, None, reference)
        except DeviceLostError as error:
            raise UserError(
                f"{device} has failed for this process: {error}", "restart Python, and leave out the failing function"
            ) from error
    compared = []
    for item in contenders:
        base = {_variant_key(row): row for row in rows_of_case[item.reference] if row.mode == reference}
        for row in rows_of_case[item.case.number]:
            if item.note:
                row = replace(row, note=", ".join(filter(None, (row.note, item.note))))
            if item.case.number != item.reference:
                base_row = base.get(_variant_key(row))
                ratio = None if base_row is None else ratio_over(row, base_row)
                row = replace(row, ratio=ratio, ratio_p10=None, ratio_p50=None, ratio_p90=None)
            compared.append(row)
    return compared


def _variant_key(row: Result) -> tuple[object, ...]:
    return tuple(getattr(row, name) for name in VARIANT_COLUMNS if name not in MODE_COLUMNS)


def _arguments(
    function: Callable[..., Any], inputs: Inputs, request: RunRequest
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(request.inputs.seed)

    def argument_of(value: Any) -> Any:
        if isinstance(value, tuple) and all(type(size) is int for size in value):
            tensor = torch.randn(value, generator=generator)
        elif isinstance(value, Tensor) and value.is_meta:
            tensor = _random_like(value, generator)
        else:
            return value
        return tensor.to(request.inputs.device).requires_grad_(request.timing.backward and tensor.is_floating_point())

    if not isinstance(inputs, Mapping):
        return tuple(argument_of(value) for value in inputs), {}
    names = _other_names(function)
    return (), {names.get(name, name): argument_of(value) for name, value in inputs.items()}


def _other_names(function: Callable[..., Any]) -> dict[str, str]:
    return {"self": "input"} if isinstance(function, BuiltinFunctionType) else {}


def _random_like(meta: Tensor, generator: torch.Generator) -> Tensor:
    tensor = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
    if meta.is_floating_point():
        return tensor.copy_(torch.randn(meta.shape, generator=generator))
    if meta.dtype is torch.bool:
        return tensor.copy_(torch.rand(meta.shape, generator=generator) < 0.5)
    return tensor.zero_()


def _name(function: Callable[..., Any]) -> str:
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
