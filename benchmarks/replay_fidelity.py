"""Compare replayed times with times in the program, and with replays that know only shapes.

Each program is captured twice, from the same state, after steps in which the capture learns, and the first trace is
replayed: call by call with values as recorded, random and zero, and as a step replay. Figures:

- the share of signatures whose outputs have the recorded shapes;
- the error in time, each signature weighted by its calls: the sum over signatures of |replayed - captured| divided by
  the sum of captured, both medians times calls. A signature that does not run counts with all of its time;
- the times of the dearest cases if only these are replayed, compared with those when all are, medians of three replays
  in turn: the median and largest difference of the cases that take 2 % of the time or more. The first of three replays
  of all compared with the median of the others is the noise of these figures;
- the sum of the replayed calls, one by one and as a step, divided by that of the same operators in the program without
  a capture, as torch.profiler times them: the program's Python between them is in neither.

The second capture's error is the noise floor: the variation of the program from one run to the next. A part in
which other programs took the processors is repeated at most twice; if all tries are disturbed, the benchmark reports it
and shows no figures of its times.

    python benchmarks/replay_fidelity.py --workload 'BERT train'
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "9")

import pandas as pd
import torch
from capture_truth import profiled_times
from others import DISTURBED, Part, in_a_process, measure_part
from rich.console import Console
from rich.table import Table
from workloads import REPLAYED, Workload, make_on

from opgrip.capture import Capture, Schedule
from opgrip.platform.activity_records import recorded_activities
from opgrip.replay.command.replay import replay
from opgrip.replay.inputs.input_options import KINDS, RECORDED
from opgrip.replay.reports.fidelity import Fidelity
from opgrip.replay.reports.outcome import Results
from opgrip.traces import Trace, load
from opgrip.traces.codec.record_forms import to_json

WARMUP, LEARNED = 3, 2
TOPS = (1, 5, 30)  # numbers of the dearest cases that are replayed without the others
LARGE_SHARE = 0.02  # share of the time from which a case counts there
ROUNDS = 3  # replays of each number of cases, in turn
ROUNDS_ALONE = 5  # rounds of torch.profiler on the program without a capture
Row = tuple[str, ...]
COLUMNS = ("program", "calls", "signatures", "what", "shapes as recorded", "error in time", "x noise floor", "total")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=REPLAYED, action="append", help="only this one; can be repeated")
    parser.add_argument("--steps", type=int, default=3, help="captured steps (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of the program (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="that the programs run on (default: %(default)s)")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="also list the N signatures of most error")
    args = parser.parse_args()
    console = Console(width=150)
    console.print(
        f"torch {torch.__version__}, {args.threads} threads, {args.device}, {args.steps} captured steps",
        highlight=False,
    )
    table = Table(*COLUMNS)
    for name in args.workload or REPLAYED:
        measured = in_a_process(measure, name, args.steps, args.threads, args.device)
        if measured is None:
            console.print(f"{name}: a required package is not installed")
            continue
        rows, worst = measured
        for row in rows:
            table.add_row(*row)
        table.add_section()
        if worst is not None and args.worst:
            console.print(worst.head(args.worst).to_string(max_colwidth=60), highlight=False)
    console.print(table)


def measure(name: str, steps: int, threads: int, device: str) -> tuple[list[Row], pd.DataFrame | None] | None:
    """Return the table rows of a program, and its signatures in order of decreasing error.

    The signatures are None if other programs disturbed the replay. Return None if the program is not installed.

    steps, threads : number of recorded steps, and number of torch's threads
    """
    torch.set_num_threads(threads)
    make = partial(make_on, device, REPLAYED[name])
    if make() is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "0.jsonl"
        first = measure_part(partial(_load_program, make, path, steps))
        if first.is_disturbed:
            return [(name, "", "", f"first capture {first}", *(DISTURBED,) * 4)], None
        trace, captured = first.value, captured_times(first.value)
        alone_ms = measure_part(
            partial(time_alone, make, trace, steps, torch.device(device).type in recorded_activities())
        )
        second = measure_part(partial(_load_program, make, Path(folder) / "1.jsonl", steps))
        rows = {kind: measure_part(partial(replay_trace, path, (kind,))) for kind in KINDS}
        selected = measure_part(partial(_replay_selections, path))
        sequence = measure_part(partial(replay, path, sequence=True))
    row, floor = _row_of_floor(name, trace, captured, second)
    of_sequence = Part(sequence.value.frame, sequence.others)
    return [
        row,
        *(_row(f"replay, {kind}", captured, part, floor, _share(part, alone_ms)) for kind, part in rows.items()),
        *_rows_of_selections(selected, captured),
        _row("in the sequence", captured, of_sequence, floor, _total(sequence, alone_ms)),
    ], None if rows[RECORDED].is_disturbed else _worst(captured, rows[RECORDED].value)


def _load_program(make: Callable[[], Workload | None], path: Path, steps: int) -> Trace:
    """Return a trace of `steps` steps of an installed program, which is written to `path`.

    make : returns a new instance of the program
    """
    path.unlink(missing_ok=True)
    capture_program(make, path, steps)
    return load(path)


def _replay_selections(path: Path) -> dict[int | None, list[pd.Series]]:
    """Return times in us by case of replays of the dearest cases, by their number; None for all cases."""
    times: dict[int | None, list[pd.Series]] = {top: [] for top in (None, *TOPS)}
    for _ in range(ROUNDS):
        for top, replays in times.items():
            replays.append(replay_trace(path, (RECORDED,), top=top).set_index("case")["median_us"])
    return times


def _rows_of_selections(part: Part[dict[int | None, list[pd.Series]]], captured: pd.DataFrame) -> list[Row]:
    """Return the rows of how far times of the dearest cases differ from those when all are replayed."""
    time_us = captured["count"] * captured["us"]
    large = time_us.index[time_us >= LARGE_SHARE * time_us.sum()]

    def row(what: str, times: list[pd.Series], whole: list[pd.Series]) -> Row:
        one, other = (pd.concat(replays, axis=1).median(axis=1) for replays in (times, whole))
        off = (one / other - 1).abs().reindex(large).dropna()
        return ("", "", "", what, "-", "-", "-", part.figure(f"{off.median():.1%} off, at most {off.max():.0%}"))

    (first, *others) = whole = part.value[None]
    rows = [row(f"replay, --top {top}", part.value[top], whole) for top in TOPS]
    return [row("replay, all again", [first], others), *rows]


def _share(part: Part[pd.DataFrame], alone_ms: Part[float]) -> str:
    """Return a cell with the total time of a replay divided by the captured one and by that of the program."""
    rows = part.value.dropna(subset=["median_us", "captured_us"])
    replayed, captured = ((rows["count"] * rows[name]).sum() for name in ("median_us", "captured_us"))
    alone = alone_ms.figure(f"{replayed / 1e3 / alone_ms.value:.2f} of the program's")
    return part.figure(f"{replayed / captured:.2f} of the captured, {alone}")


def _total(sequence: Part[Results], alone_ms: Part[float]) -> str:
    """Return a cell with the total time of a step replay divided by that of the same operators in the program.

    sequence : results of the step replay
    alone_ms : time of the operators in the program without a capture
    """
    replayed_ms = sequence.value.header["sequence"]["replayed_ms"]
    if replayed_ms is None:
        return "contended"
    return sequence.figure(alone_ms.figure(f"{replayed_ms / alone_ms.value:.2f} of the program's"))


def capture_program(make: Callable[[], Workload | None], path: Path, steps: int) -> Path | None:
    """Record `steps` steps of a new instance of a program, after steps that are not recorded.

    Return the path of the trace, or None if the program's package is not installed.

    make : returns the new instance
    """
    step = make()
    if step is None:
        return None
    for _ in range(WARMUP):
        step()
    with Capture(path, schedule=Schedule(warmup=LEARNED, active=steps)) as capture:
        for place in range(LEARNED + steps):
            step()
            if place < LEARNED:
                capture.step()
    return path


def time_alone(make: Callable[[], Workload | None], trace: Trace, steps: int, is_recorded: bool) -> float:
    """Return the time in ms of a trace's operators in the same number of steps without a capture, by the profiler.

    make : returns a new instance of the program
    is_recorded : True for the time of their kernels, which the device records
    """
    step = make()
    assert step is not None
    for _ in range(WARMUP):
        step()
    names = {"::".join(op.split(".")[:2]) for op in trace.own_calls["op"].unique()}
    rounds = [profiled_times(step, names, steps, is_recorded) for _ in range(ROUNDS_ALONE)]
    return median(sum(map(sum, times.values())) for times in rounds) / 1e3


def captured_times(trace: Trace) -> pd.DataFrame:
    """Return the number of calls and the median time in us of each signature."""
    calls = trace.own_calls
    groups = calls.groupby("signature")["time_ns"]
    return pd.DataFrame({"count": groups.size(), "us": groups.median() / 1e3})


def times_by_first(first: Trace, second: Trace) -> pd.Series:
    """Return the median captured time in us in the trace `second`, by signature number in the trace `first`."""
    number = {_text(signature): signature.number for signature in first.signatures}
    again = {signature.number: number.get(_text(signature)) for signature in second.signatures}
    times = captured_times(second)["us"].rename(index=again)
    return times[times.index.notna()].groupby(level=0).median()


def _text(signature: object) -> str:
    form = to_json(signature)  # type: ignore[arg-type]
    return repr(_without_values({key: form[key] for key in ("op", "args") if key in form} | form.get("kwargs", {})))


def _without_values(form: object) -> object:
    if isinstance(form, dict):
        return {key: _without_values(value) for key, value in form.items() if key != "values"}
    return [_without_values(item) for item in form] if isinstance(form, list) else form


def replay_trace(path: Path, kinds: Sequence[str], **options: Any) -> pd.DataFrame:
    """Return the results of replays of a trace, one with each value of `--values` in `kinds`.

    options : other options of `opreplay`
    """
    return pd.concat([replay(path, values=kind, **options).frame for kind in kinds], ignore_index=True)


def _row_of_floor(name: str, trace: Trace, captured: pd.DataFrame, second: Part[Trace]) -> tuple[Row, Part[float]]:
    """Return the table row of a second capture, and the noise floor, which is the error of its times.

    trace, captured : first capture, and its median times by signature
    """
    floor, missing = noise_floor(captured, times_by_first(trace, second.value))
    what = "second capture" + (f" ({missing} not met again)" if missing else "")
    numbers = f"{len(trace.own_calls):,}", f"{len(captured):,}"
    row = (name, *numbers, what, "-", *map(second.figure, (f"{floor:.1%}", "1.00")), "-")
    return row, Part(floor, second.others)


def _row(what: str, captured: pd.DataFrame, part: Part[pd.DataFrame], floor: Part[float], total: str) -> Row:
    rows = part.value.set_index("case")
    right, compared = count_faithful(rows)
    error, failed = time_error(captured, rows["median_us"].dropna())
    missing = f" ({failed} do not run)" if failed else ""
    times = part.figure(f"{error:.1%}"), part.figure(floor.figure(f"{error / max(floor.value, 1e-9):.2f}"))
    return ("", "", "", what + missing, f"{right / max(compared, 1):.2%}", *times, total)


def count_faithful(rows: pd.DataFrame) -> tuple[int, int]:
    """Return how many signatures' outputs have the recorded shapes, and for how many that is known."""
    faithful = rows["faithful"].dropna().astype(bool)
    return int(faithful.sum()), len(faithful)


def noise_floor(captured: pd.DataFrame, again: pd.Series) -> tuple[float, int]:
    """Return the weighted error of a second capture's times, and the number of signatures that it lacks.

    captured : number of calls and median time of the first capture, by signature
    again : median times of the second capture in us, by signature of the first
    """
    common = captured[captured.index.isin(again.index)]
    return time_error(common, again)[0], len(captured) - len(common)


def time_error(captured: pd.DataFrame, times: pd.Series) -> tuple[float, int]:
    """Return the error of times in us, weighted by calls, and the number of signatures that have no time.

    captured : number of calls and median captured time of each signature
    times : times to compare, by signature
    """
    columns = captured["count"], captured["us"], times.reindex(captured.index).fillna(0.0)
    fidelity = Fidelity.of([*zip(*(column.tolist() for column in columns), strict=True)])
    assert fidelity is not None, "programs have calls with times"
    return fidelity.error, len(captured.index.difference(times.index))


def _worst(captured: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a replay in order of decreasing error, in us over all calls.

    captured : number of calls and median captured time of each signature
    """
    recorded = rows.set_index("case")
    recorded["off"] = (recorded["median_us"] - captured["us"]) * captured["count"]
    worst = recorded.reindex(recorded["off"].abs().sort_values(ascending=False).index)
    return worst[["op", "shapes", "count", "captured_us", "median_us", "spread", "off"]]


if __name__ == "__main__":
    main()
