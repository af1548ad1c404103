"""Verdicts on candidates (implementations of operators by a user), and the time that they save in a step."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import fsum, hypot, inf
from statistics import fmean
from typing import Any

from opgrip.cli.command import counted
from opgrip.replay.cases.selection import FORWARD
from opgrip.replay.modes import CANDIDATE
from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.paired_ratio import EQUAL, FASTER, SLOWER, UNDECIDED, WITHIN_95, PairedRatio
from opgrip.replay.results.results import FAILED, RAN, SKIPPED, WRONG, Result

VERDICTS = (WRONG, FAILED, SLOWER, UNDECIDED, EQUAL, FASTER)  # verdicts in the order of tables, worst first


@dataclass(frozen=True, slots=True)
class CandidateColumns(Columns):
    verdict: str | None = column(
        "verdict on the candidate: `wrong`, `failed`, `slower`, `faster`, `equal` (within 5 %), `undecided`",
        heading="verdict",
    )
    ratio_low: float | None = column("lower end of the 95 % interval of the candidate's time over the operator's")
    ratio_high: float | None = column("upper end of the 95 % interval of the candidate's time over the operator's")
    step_share: float | None = column("share of the step's captured time that the row's calls take", "1")
    step_saving: float | None = column(
        "share of the step's captured time that the candidate saves in the row's calls; negative if it is slower", "1"
    )
    step_saving_error: float | None = column("half of the 95 % interval of `step_saving`", "1")
    export: str | None = column("command that exports a wrong call as one file")
    labels: str | None = column(
        "JSON: for each label of `record_function` with some of the row's calls, their number and their share of the "
        "captured time of all calls within the label",
        hidden=True,
    )
    undecided_because: str | None = column("why the verdict is `undecided`")


def judge_rows(
    rows: Sequence[Result],
    reference: str,
    step_us: float | None,
    export: str,
    labels: Mapping[int, Mapping[str, tuple[int, float]]],
) -> list[Result]:
    """Return the rows, with verdicts added to those of candidates.

    step_us : captured time of all calls of the step; None if the rows belong to no step
    """
    from opgrip.replay.results.ratios import base_index

    judged = list(rows)
    by_case: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(rows):
        by_case.setdefault((row.case_of_trace, row.device, row.dtype), []).append(index)
    for indices in by_case.values():
        own = [rows[index] for index in indices]
        for index, row in zip(indices, own, strict=True):
            if row.mode == CANDIDATE:
                base = base_index(own.index(row), own, reference)
                judged_row = _judged(row, None if base is None else own[base], step_us, export)
                if row.case in labels and row.direction == FORWARD:
                    judged_row = judged_row.adding(
                        replace(CandidateColumns.of(judged_row), labels=json.dumps(labels[row.case]))
                    )
                judged[index] = judged_row
    return judged


def _judged(row: Result, base: Result | None, step_us: float | None, export: str) -> Result:
    if row.status == SKIPPED:
        return row
    share = (row.captured_total_us or 0.0) / step_us if step_us and row.direction == FORWARD else None
    if row.status not in RAN:
        verdict = WRONG if row.status == WRONG else FAILED
        case = f"{shlex.quote(row.module)} --unit module" if is_of_module(row) else str(row.case)
        command = f"{export} {case} -o case{row.case}.py" if export and row.status == WRONG else None
        return row.adding(CandidateColumns(verdict, step_share=share, export=command))
    ratio = None if base is None or not row.ratio else PairedRatio.of(row)
    if ratio is None:
        reason = "no valid times: other processes used the cores, or the operator was not timed"
        return row.adding(CandidateColumns(UNDECIDED, step_share=share, undecided_because=reason))
    saving = error = None
    if share is not None:
        saving, error = share * (1 - ratio.middle), WITHIN_95 * share * ratio.middle * ratio.error
    judged = CandidateColumns(ratio.verdict, *ratio.interval, share, saving, error)
    return row.adding(replace(judged, undecided_because=ratio.undecided_because))


def is_of_module(row: Result) -> bool:
    return bool(row.module) and row.op.split(" ")[0] == row.module


def saving_in_words(saving: float, error: float | None = None, digits: int = 1) -> str:
    """Return a text such as `saves 3.1 % ± 0.4`, or `costs` instead of `saves` if the saving is negative."""
    interval = "" if error is None else f" ± {100 * error:.{digits}f}"
    return f"{'saves' if saving >= 0 else 'costs'} {100 * abs(saving):.{digits}f} %{interval}"


@dataclass(frozen=True, slots=True)
class PartSaving:
    """The time that candidates save in a phase of a step, or in the calls within a label of `record_function`.

    All shares are of a captured time: for a phase, of the step; for a label, of all calls within the label.

    share : share of the time that the judged operators take in this part
    saving : share of the time that the candidates save in this part; negative if they are slower
    error : half of the 95 % interval of `saving`
    """

    share: float
    saving: float
    error: float


@dataclass(frozen=True, slots=True)
class StepSaving:
    """How much candidates save in the step of one trace.

    run : kind of step, such as `predict`
    verdicts : number of signatures with each verdict
    gradients : number of signatures with each verdict on their gradients
    share : share of the step's captured time that the judged operators take; None if the rows belong to no step
    saving : share of the step that the candidates save; negative if they are slower
    error : half of the 95 % interval of `saving`
    untimed : number of rows with correct results but without a valid time
    """

    trace: str
    model: str
    run: str
    verdicts: dict[str, int]
    gradients: dict[str, int]
    share: float | None
    saving: float
    error: float
    untimed: int
    phases: dict[str, PartSaving]
    labels: dict[str, PartSaving]


@dataclass(frozen=True, slots=True)
class JudgedStep(StepSaving):
    rows: Sequence[Result]

    @property
    def signatures(self) -> int:
        return sum(self.verdicts.values())

    @property
    def what(self) -> str:
        return "module" if is_of_module(self.rows[0]) else "operator"

    @property
    def ratio_low(self) -> float:
        """Lower end of the 95 % interval of (judged operators' time with candidates) / (their time without)."""
        return 1 - (self.saving + self.error) / self.share if self.share else 0.0

    @property
    def ratio_high(self) -> float:
        """Upper end of the 95 % interval of (judged operators' time with candidates) / (their time without)."""
        return 1 - (self.saving - self.error) / self.share if self.share else inf

    @property
    def broken(self) -> int:
        return sum(counts[verdict] for counts in (self.verdicts, self.gradients) for verdict in (WRONG, FAILED))

    @property
    def line(self) -> str:
        of, of_gradients = (
            f"of {counted(sum(counts.values()), 'signature')}" for counts in (self.verdicts, self.gradients)
        )
        parts = [f"{verdict} on {self.verdicts[verdict]} {of}" for verdict in (WRONG, FAILED) if self.verdicts[verdict]]
        parts += [
            f"gradients {verdict} on {self.gradients[verdict]} {of_gradients}"
            for verdict in (WRONG, FAILED)
            if self.gradients[verdict]
        ]
        if self.share is not None:
            is_one = len({row.op for row in self.rows}) == 1
            what = f"this {self.what} takes" if is_one else f"these {self.what}s take"
            parts.append(
                f"{saving_in_words(self.saving, self.error)} of the step ({what} {100 * self.share:.1f} % of it)"
            )
        else:
            parts.append(f"faster on {self.verdicts[FASTER]} {of}")
        parts.append(f"slower on {self.verdicts[SLOWER]} {of}")
        if self.gradients[SLOWER]:
            parts.append(f"slower in the backward of {self.gradients[SLOWER]} {of_gradients}")
        if self.untimed:
            parts.append(f"{self.untimed} without a valid time")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class MeanSaving:
    """The mean saving of candidates over models; each model has the same weight, divided equally among its traces.

    share : mean share of the step that the judged operators take
    saving : mean share of the step that the candidates save; negative if they are slower
    error : half of the 95 % interval of `saving`
    """

    models: int
    traces: int
    share: float
    saving: float
    error: float

    @property
    def line(self) -> str:
        return (
            f"mean over {counted(self.models, 'model')}, {counted(self.traces, 'trace')}: "
            f"{saving_in_words(self.saving, self.error, 2)} of the step "
            f"(the judged operators take {100 * self.share:.2f} % of it)"
        )


def mean_saving(steps: Sequence[JudgedStep]) -> MeanSaving | None:
    by_model: dict[str, list[JudgedStep]] = {}
    for step in steps:
        if step.share is not None:
            by_model.setdefault(step.model or step.trace, []).append(step)
    if not by_model:
        return None
    models = by_model.values()
    return MeanSaving(
        models=len(models),
        traces=sum(map(len, models)),
        share=fmean(fmean(step.share or 0.0 for step in own) for own in models),
        saving=fmean(fmean(step.saving for step in own) for own in models),
        error=hypot(*(step.error / len(own) for own in models for step in own)) / len(models),
    )


@dataclass(frozen=True, slots=True)
class SavingLine:
    trace: str
    part: str  # phase or label, in words; empty for the whole step
    share: float
    saving: float
    error: float
    signatures: int | None = None
    slower: int | None = None
    broken: int | None = None


def saving_lines(steps: Sequence[JudgedStep]) -> list[SavingLine]:
    lines = []
    for step in steps:
        if step.share is not None and len(steps) > 1:
            counts = (step.signatures, step.verdicts[SLOWER], step.broken)
            lines.append(SavingLine(step.trace, "", step.share, step.saving, step.error, *counts))
        phases = {f"{phase} of the step": part for phase, part in step.phases.items() if len(step.phases) > 1}
        parts = phases | {f"within {label}": part for label, part in step.labels.items()}
        lines += [SavingLine(step.trace, name, part.share, part.saving, part.error) for name, part in parts.items()]
    return lines


def summary_lines(steps: Sequence[JudgedStep]) -> list[str]:
    mean = mean_saving(steps)
    if mean is not None and len(steps) > 1:
        return [mean.line]
    return [f"{step.trace}: {step.line}" if step.trace else step.line for step in steps]


def judged_steps(rows: Iterable[Result]) -> list[JudgedStep]:
    by_trace: dict[str, list[Result]] = {}
    for row in rows:
        if CandidateColumns.of(row).verdict is not None:
            by_trace.setdefault(row.trace, []).append(row)
    return [_judged_step(trace, own) for trace, own in by_trace.items()]


def _judged_step(trace: str, rows: Sequence[Result]) -> JudgedStep:
    columns = [CandidateColumns.of(row) for row in rows]
    shares = [item.step_share for item in columns if item.step_share is not None]
    return JudgedStep(
        trace=trace,
        model=rows[0].added.get("model") or "",
        run=rows[0].added.get("run") or "",
        rows=rows,
        verdicts=_by_verdict(row for row in rows if row.direction == FORWARD),
        gradients=_by_verdict(row for row in rows if row.direction != FORWARD),
        share=fsum(shares) if shares else None,
        saving=fsum(item.step_saving or 0.0 for item in columns),
        error=hypot(*(item.step_saving_error or 0.0 for item in columns)),
        untimed=sum(item.verdict == UNDECIDED and item.ratio_low is None for item in columns),
        phases=_parts(
            (site.phase, judged.step_share * site.count / sum(site.count for site in row.sites), judged)
            for row, judged in zip(rows, columns, strict=True)
            for site in row.sites
            if judged.step_share is not None
        ),
        labels=_parts(
            (label, share, judged)
            for judged in columns
            for label, (_, share) in json.loads(judged.labels or "{}").items()
        ),
    )


def _parts(uses: Iterable[tuple[str, float, CandidateColumns]]) -> dict[str, PartSaving]:
    by_part: dict[str, list[tuple[float, float, float]]] = {}
    for part, share, judged in uses:
        # the saving in the step is scaled to the share that these calls take
        scale = share / judged.step_share if judged.step_share else 0.0
        saving, error = (scale * (value or 0.0) for value in (judged.step_saving, judged.step_saving_error))
        by_part.setdefault(part, []).append((share, saving, error))
    return {
        part: PartSaving(fsum(shares), fsum(savings), hypot(*errors))
        for part, own in by_part.items()
        for shares, savings, errors in [zip(*own, strict=True)]
    }


def _by_verdict(rows: Iterable[Result]) -> dict[str, int]:
    counts = Counter(CandidateColumns.of(row).verdict for row in rows)
    return {verdict: counts[verdict] for verdict in VERDICTS}


# field of a results file's header with what the candidates save; `replay/schema.json` describes it
JUDGEMENT = "judgement"
VERSION = 1  # version of its form: fields may be added without a new one


def judgement_in(rows: Iterable[Result]) -> dict[str, Any]:
    steps = judged_steps(rows)
    if not steps:
        return {}
    plain = [{item.name: getattr(step, item.name) for item in fields(StepSaving)} for step in steps]
    for step in plain:
        step |= {name: {part: asdict(own) for part, own in step[name].items()} for name in ("phases", "labels")}
    mean = mean_saving(steps)
    return {JUDGEMENT: {"version": VERSION, "mean": None if mean is None else asdict(mean), "steps": plain}}
