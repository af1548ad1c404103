"""`judge()`: is an implementation right and faster on the calls of a trace, and how much time does it save?"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opgrip.cli.options import arguments_of
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError, in_words_of_python
from opgrip.replay.analyses.candidates import print_judgement
from opgrip.replay.command.replay import replay, replay_arguments
from opgrip.replay.modes import CANDIDATE
from opgrip.replay.modes.candidate import candidate_of
from opgrip.replay.outcome import Results
from opgrip.replay.replay_options import make_parser, words_of
from opgrip.replay.results.judgement import JudgedStep, judged_steps, mean_saving
from opgrip.replay.results.results import Result
from opgrip.replay.run.measure import CachedRows, measure_cases
from opgrip.replay.run.workload import Workload
from opgrip.replay.timing import pages
from opgrip.replay.workers.executors import LocalExecutor

if TYPE_CHECKING:
    import pandas as pd


EXCLUDED = ("strict", "list", "candidate", "candidates", "gate")  # options of opreplay that `judge` does not take


@dataclass(frozen=True, slots=True, repr=False)
class Judgement:
    """The result of `judge`: are the candidates, which are implementations of operators, right, and do they save time?

    results : rows of the operators and of the candidates, one for each case and mode
    """

    results: Results

    @property
    def frame(self) -> pd.DataFrame:
        """Data frame with one row for each signature and its candidate; `verdict` and `step_saving` are columns."""
        return Results([row for row in self.results if row.mode == CANDIDATE], self.results.header).frame

    @property
    def steps(self) -> list[JudgedStep]:
        """For each trace, the share of its step that the candidates save."""
        return judged_steps(self.results)

    @property
    def step_saving(self) -> float | None:
        """Share of the captured time of a step that the candidates save, 0 to 1; the mean if there are several traces.

        None if the calls belong to no step, as for samples.
        """
        mean = mean_saving(self.steps)
        return None if mean is None else mean.saving

    @property
    def is_right(self) -> bool:
        """True if the candidates ran on all calls and all their results are correct."""
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
    it. Name functions as text, `my_kernels.py:softmax`, to run them in separate processes.

    candidates : by the full name of the operator, such as `aten._softmax.default`: any callable that takes the
        operator's arguments, such as a function, an operator of `torch.library` or a compiled function. With
        `unit="module"`, by the path of a module, such as `module:backbone.layer1.*`: a class below `nn.Module`, an
        object of one, or a function of the module's tensors
    trace : one or several traces, a folder of traces, `zoo` or `zoo:PATTERN`
    options : long names of options in `opreplay --help`, with `_` for `-`

    Raises TypeError if an option is unknown, or a candidate is neither callable nor text.

    Raises UserError if the value of an option is invalid, or no call of an operator is recorded.
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
        args = arguments_of(make_parser(), words_of(trace), options, excluded=EXCLUDED)
        args.candidate = tuple(candidate_of(op, function) for op, function in functions.items())
        return Judgement(replay_arguments(args, _ThisProcess()))


class _ThisProcess(LocalExecutor):
    def compile(self, workload: Workload, done: Collection[int], reporter: Reporter, may_fork: bool) -> CachedRows:
        return {}

    def run(
        self, workload: Workload, done: Collection[int], cached_rows: CachedRows, may_fork: bool
    ) -> Iterator[list[Result]]:
        cases = [case for case in workload.cases if case.number not in done]
        return measure_cases(cases, workload, workload.surroundings)
