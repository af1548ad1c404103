"""Measure replays of the models' traces and of the zoo's, and the device's ceilings."""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter
from typing import Any

from gpu.observers import trace_of
from gpu.step import NotHereError, Place
from opgrip.platform.peaks import to_json
from opgrip.replay import replay
from opgrip.replay.analyses.roofline.measuring import measure
from opgrip.replay.operators.devices import with_index
from opgrip.zoo.scoring.scores import distilled_scores

BUDGET_S, SMALL_BUDGET_S = 0.1, 0.05
TIMEOUT_S = 30
MOST_CASES = 300  # cases with most time that are replayed: a detector has a thousand
SMALL_TOP = 2
BAD = 12  # failing rows to note


def measure_replay(place: Place, name: str, top: int = MOST_CASES, **options: Any) -> None:
    """Note the error of a replay of a model's calls.

    place : device of the step, and file in which the results are noted
    name : name of the model
    top : number of cases to replay, those with the most time
    options : further arguments of `replay`
    """
    _note_errors(place, *_replay(place, name, top=top, **options))


def measure_selections(place: Place, name: str) -> None:
    """Note the times of a model's five dearest calls if one, five and thirty are replayed: they should be the same.

    place : device of the step, and file in which the results are noted
    """
    for top in (1, 5, 30):
        frame = _replay(place, name, top=top)[0].frame.head(5)
        place.note(**{f"top_{top}": frame[["op", "captured_us", "median_us"]].values.tolist()})


def measure_mode(place: Place, name: str, mode: str, top: int) -> None:
    """Note statuses and speed-ups of a mode on the `top` calls with the most time in the trace of the model `name`.

    place : device of the step, and file in which the results are noted
    """
    results, seconds = _replay(place, name, top=top, mode=[mode], timeout=TIMEOUT_S + 10)
    frame = results.frame
    place.note(
        mode=mode,
        seconds=seconds,
        statuses={mode: rows["status"].value_counts().to_dict() for mode, rows in frame.groupby("mode", observed=True)},
        ratio=frame[frame["mode"] == mode]["ratio"].describe().to_dict(),
        bad=_bad_rows(frame, ["op", "mode", "status", "error"]),
    )


def measure_sequence(place: Place, name: str, **options: Any) -> None:
    """Note the times of a replay of a model's steps.

    place : device of the step, and file in which the results are noted
    name : name of the model
    options : further arguments of `replay`
    """
    results, seconds = _replay(place, name, sequence=True, **options)
    plain = {key: value for key, value in results.header["sequence"].items() if isinstance(value, int | float | str)}
    place.note(seconds=seconds, **plain)


def measure_by_ncu(place: Place, name: str) -> None:
    """Note the columns of Nsight Compute for the calls with most time.

    place : device of the step, and file in which the results are noted
    name : name of the model
    """
    results, seconds = _replay(place, name, top=10, ncu=True)
    columns = ["op", "median_us", *(name for name in results.frame.columns if name.startswith("ncu_"))]
    place.note(seconds=seconds, columns=columns, rows=results.frame[columns].values.tolist())


def measure_ceilings(place: Place) -> None:
    """Note the rates and bandwidths that the device reaches.

    place : device of the step, and file in which the results are noted
    """
    began = perf_counter()
    ceilings = measure(with_index(place.device))
    place.note(seconds=perf_counter() - began, ceilings=to_json(ceilings))


def measure_zoo(place: Place) -> None:
    """Note which operators of the zoo's 500 cases run on the device, and the device's score.

    place : device of the step, and file in which the results are noted
    """
    began = perf_counter()
    results = replay(
        "trace:zoo_500",
        device=place.device,
        budget=SMALL_BUDGET_S if place.is_small else BUDGET_S,
        timeout=20,
        output=place.kept / "zoo.json",
        force=True,
        **({"top": SMALL_TOP} if place.is_small else {}),
    )
    frame, seconds = results.frame, perf_counter() - began
    bad = frame[frame["status"] != "ok"]
    place.note(
        seconds=seconds,
        rows=len(frame),
        per_s=len(frame) / seconds,
        statuses=frame["status"].value_counts().to_dict(),
        bad={
            f"{op}: {status}": int(rows)
            for (op, status), rows in bad.groupby(["op", "status"], observed=True).size().items()
        },
        bad_errors=bad[["op", "error"]].drop_duplicates("op").values.tolist(),
    )
    columns = ["gpu_us", "launch_gap_us", "of_peak_rate", "of_peak_bandwidth"]
    kernels = frame[frame["gpu_us"].notna()].astype(dict.fromkeys(columns, float))
    place.note(
        rows_with_kernels=len(kernels),
        launch_bound=int(kernels["launch_bound"].eq(True).sum()),
        median_over_gpu=(kernels["median_us"] / kernels["gpu_us"]).describe().to_dict(),
        **{name: kernels[name].describe().to_dict() for name in columns[1:]},
    )
    for score in distilled_scores(results):
        place.note(score=score.score, speed=score.speed, supported=score.supported, partial=score.is_partial)


def _replay(place: Place, name: str, **options: Any) -> tuple[Any, float]:
    """Replay the trace of the model `name`; return the results, which are also kept in a file, and the duration in s.

    place : device of the replay, and folders of the trace and of the results
    options : further arguments of `replay`
    """
    trace = trace_of(place, name)
    if not trace.exists():
        raise NotHereError(f"there is no {trace.name}: its capture failed or was not among the steps")
    if place.is_small and "top" in options:
        options["top"] = SMALL_TOP
    if "sequence" not in options:
        options["budget"] = SMALL_BUDGET_S if place.is_small else BUDGET_S
    output = place.kept / f"{place.step.replace(':', '-')}.json"
    began = perf_counter()
    results = replay(
        trace, **{"device": place.device, "timeout": TIMEOUT_S, "output": output, "force": True, **options}
    )
    return results, perf_counter() - began


def _note_errors(place: Place, results: Any, seconds: float) -> None:
    """Note the error of the replayed times: the sum of absolute differences over the sum of captured times.

    place : device of the step, and file in which the results are noted
    results : results of the replay
    seconds : duration of the replay
    """
    frame = results.frame
    ok = frame[(frame["status"] == "ok") & frame["median_us"].notna() & (frame["captured_us"] > 0)]
    captured_us = (ok["count"] * ok["captured_us"]).sum()
    facts: dict[str, Any] = {"timed": len(ok)}
    if len(ok):
        facts |= {
            "error": (ok["count"] * (ok["median_us"] - ok["captured_us"]).abs()).sum() / captured_us,
            "total_ratio": (ok["count"] * ok["median_us"]).sum() / captured_us,
            "spread": ((ok["p90_us"] - ok["p10_us"]) / ok["median_us"]).median(),
            "mean_over_median": (ok["mean_us"] / ok["median_us"]).median(),
        }
    for column in ("stopped", "clock_mhz"):
        with suppress(KeyError):
            facts[column] = frame[column].value_counts().to_dict()
    place.note(
        seconds=seconds,
        rows=len(frame),
        per_s=len(frame) / seconds,
        statuses=frame["status"].value_counts().to_dict(),
        **facts,
        bad=_bad_rows(frame, ["op", "status", "error"]),
    )


def _bad_rows(frame: Any, columns: list[str]) -> list[list[Any]]:
    rows: list[list[Any]] = frame[frame["status"] != "ok"][columns].head(BAD).values.tolist()
    return rows
