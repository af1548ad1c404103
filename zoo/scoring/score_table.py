"""The score as a printed table: one line per model and a total."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp
from typing import IO, Any

from opgrip.cli.command import counted, printable
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.replay.results.paired_ratio import WITHIN_95
from opgrip.replay.results.results import CONTENDED, OK, SKIPPED, WRONG
from opgrip.zoo.scoring.score_values import WHOLE, ModelScore, Score

NOTHING = "-"
TOTAL = "total"
PARTIAL = "*"
MOST_SLOWED = 0.1  # share of contended rows from which on the score comes with a warning about a busy machine
ALL = 0.9995  # share that counts as all
LEFT_OUT = "of operators for other kinds of devices"
LEAST_COVERED = 0.5  # share of the baseline's time of the requested traces below which `opreplay` prints no score


def print_scores(scores: Sequence[Score], file: IO[str], least: float = 0.0) -> None:
    few = [score.covered for score in scores if score.covered is not None and score.covered < least]
    for score in scores:
        if score.covered is None or score.covered >= least:
            _print_score(score, file)
    if few:
        print_line(f"no score: these cases take {_share(max(few))} of the baseline's time, less than {least:.0%}", file)


def score_line(score: Score) -> str:
    if score.score is None:
        return f"no score under {printable(score.way)} on {printable(score.measured.machine)}: {_why_none(score)}"
    spread = f", ± {exp(WITHIN_95 * score.deviation) - 1:.1%} between replays"
    models = ""
    if score.interval is not None:
        low, high = score.interval
        models = f", {low:.3f} to {high:.3f} if models are resampled"
    partial = ", partial" if score.is_partial else ""
    selected = "" if (score.selected or 1.0) >= ALL else f" over cases of {score.selected:.1%} of the baseline's time"
    left_out = f" without {_share(score.left_out)} of the baseline's time, {LEFT_OUT}" if score.left_out else ""
    fewer = f" over {score.traces} of the baseline's {score.of_traces} traces" if score.traces < score.of_traces else ""
    number = f"{score.score:.3f}{partial}{fewer}{selected}{left_out} (95 %{models}{spread})"
    machines = f"on {printable(score.measured.machine)}, against {printable(score.baseline)}"
    return f"score under {printable(score.way)}: {number} {machines}"


def _why_none(score: Score) -> str:
    traces = [trace for model in score.models for trace in model.traces]
    if not any(trace.base_us for trace in traces):
        return "no baseline to compare with"
    if not any(trace.compared for trace in traces):
        return "no case of the baseline is ok on this machine"
    return "the times of these cases or of the baseline are impossible"


def _print_score(score: Score, file: IO[str]) -> None:
    models = [model for model in score.models if model.statuses]
    rows = [*map(_row_of_model, models), _total_row(score)]
    print_table(COLUMNS, rows, file, printable(score.way), style=lambda row: "bold" if row is rows[-1] else None)
    print_line(score_line(score), file)
    for line in _remarks(score):
        print_line(line, file)


@dataclass(frozen=True, slots=True)
class _Row:
    model: str
    family: str
    runs: int
    statuses: Counter[str]
    base: str
    here: str
    supported: str
    speed: float | None
    score: str
    spread: str


def _row_of_model(model: ModelScore) -> _Row:
    return _Row(
        model.model,
        model.family,
        len(model.traces),
        model.statuses,
        _ms([trace.ok_base_us for trace in model.traces]),
        _ms([trace.ok_us if trace.whole_us else trace.time_us for trace in model.traces]),
        _share(model.supported),
        model.speed,
        _marked(model.score, model.is_partial),
        NOTHING if model.score is None else f"{exp(WITHIN_95 * model.uncertainty.deviation) - 1:.0%}",
    )


def _total_row(score: Score) -> _Row:
    return _Row(
        TOTAL,
        "",
        sum(len(model.traces) for model in score.models),
        sum((model.statuses for model in score.models), Counter()),
        "",
        "",
        _share(score.supported),
        score.speed,
        _marked(score.score, score.is_partial),
        NOTHING if score.score is None else f"{exp(WITHIN_95 * score.deviation) - 1:.1%}",
    )


COLUMNS = (
    TableColumn("model", "model"),
    TableColumn("family", "family", rank=7),
    TableColumn("runs", "runs", "d", rank=6),
    TableColumn("cases", lambda row: sum(row.statuses.values()), ",d", rank=3),
    TableColumn("ok", lambda row: row.statuses[OK], ",d"),
    TableColumn("wrong", lambda row: _wrong_and_not_run(row.statuses)[0], ",d"),
    TableColumn("not run", lambda row: _wrong_and_not_run(row.statuses)[1], ",d"),
    TableColumn("baseline ms", "base", ">", rank=5),
    TableColumn("here ms", "here", ">", rank=5),
    TableColumn("supported", "supported", ">"),
    TableColumn("speed", "speed", ".3f", rank=4),
    TableColumn("score", "score", ">"),
    TableColumn("±", "spread", ">", rank=4),
)


def _remarks(score: Score) -> list[str]:
    lines = []
    if any(model.is_partial for model in score.scored) or (score.score is not None and score.is_partial):
        lines.append(
            f"{PARTIAL} partial: cases of less than {WHOLE:.0%} of the baseline's time are ok, or models have no score"
        )
    if score.slowed >= MOST_SLOWED:
        lines.append(
            f"{score.slowed:.0%} of the cases were slowed down by other processes: measure again on an idle machine"
        )
    problems: dict[str, list[str]] = {}
    for model in score.models:
        for trace in model.traces:
            if trace.problem:
                problems.setdefault(trace.problem, []).append(trace.origin.trace)
    for problem, names in problems.items():
        shown = ", ".join(map(printable, names[:4])) + (f" and {len(names) - 4} others" if len(names) > 4 else "")
        lines.append(f"{counted(len(names), 'trace')}: {printable(problem)}: {shown}")
    return lines


def _ms(times_us: Sequence[float]) -> str:
    return f"{sum(times_us) / 1e3:,.2f}" if any(times_us) else NOTHING


def _share(share: float | None) -> str:
    # 99.96 % must not be rounded to 100 %
    return NOTHING if share is None else f"{min(share * 100, 99.9) if share < 1 else 100:.1f}%"


def _marked(value: float | None, is_partial: bool) -> str:
    return NOTHING if value is None else f"{value:.3f}{PARTIAL if is_partial else ''}"


# fields of a trace's score that JSON has
OF_RUN = ("score", "speed", "supported", "base_us", "time_us", "ok_base_us", "ok_us", "problem")


def plain_of(score: Score) -> dict[str, Any]:
    return {
        **asdict(score.measured),
        **_plain_shares(score),
        "interval": score.interval,
        "deviation": score.deviation,
        "baseline": score.baseline,
        "traces": score.traces,
        "of_traces": score.of_traces,
        "models": [_plain_of_model(model) for model in score.models],
    }


def _plain_shares(score: Score | ModelScore) -> dict[str, Any]:
    names = ("score", "speed", "supported", "selected", "left_out")
    return {name: getattr(score, name) for name in names} | {"partial": score.is_partial}


def _plain_of_model(model: ModelScore) -> dict[str, Any]:
    wrong, not_run = _wrong_and_not_run(model.statuses)
    return {
        "model": model.model,
        "library": model.library,
        "family": model.family,
        "weight": model.weight,
        **_plain_shares(model),
        "deviation": model.uncertainty.deviation,
        "cases": sum(model.statuses.values()),
        "ok": model.statuses[OK],
        "wrong": wrong,
        "not_run": not_run,
        "slowed": sum(trace.slowed for trace in model.traces),
        "runs": [
            {"run": trace.origin.run, "trace": trace.origin.trace} | {name: getattr(trace, name) for name in OF_RUN}
            for trace in model.traces
        ],
    }


def _wrong_and_not_run(statuses: Counter[str]) -> tuple[int, int]:
    not_run = sum(count for status, count in statuses.items() if status not in (OK, WRONG, SKIPPED, CONTENDED))
    return statuses[WRONG], not_run
