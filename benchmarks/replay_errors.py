"""Print how far replayed times differ from captured times, by size of call.

python benchmarks/replay_errors.py                          # of the H100's replays in results/h100/raw.zip
python benchmarks/replay_errors.py ROWS.json ...            # of results that opreplay has written
"""

from __future__ import annotations

import argparse
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

KEPT = Path(__file__).resolve().parent / "results/h100/raw.zip"
EDGES_US = (0, 5, 30, 100, 1000, float("inf"))  # bounds of the groups of calls by captured time
COLUMNS = ("op", "status", "count", "captured_us", "median_us")
WORST = 5  # cases with the largest share of the error to print


def main() -> None:
    """Print the tables of each result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=Path, help="results of opreplay as .json")
    for name, rows in named_rows(parser.parse_args().rows):
        timed = timed_cases(rows)
        print(f"== {name}: {len(timed)} of {len(rows)} cases have kernels")
        for label, weights in (
            ("cases", timed["count"] * 0 + 1),
            ("calls", timed["count"]),
            ("time", timed["time_us"]),
        ):
            median, p90 = (weighted_quantile(timed["relative"].abs(), weights, q) for q in (0.5, 0.9))
            print(f"relative difference by {label}: median {100 * median:.1f} %, p90 {100 * p90:.1f} %")
        print(errors_by_size(timed).to_string(float_format="{:.1f}".format))
        worst = timed.nlargest(WORST, "points")[["op", "count", "captured_us", "median_us", "points"]]
        print(worst.to_string(index=False, float_format="{:.2f}".format), end="\n\n")


def named_rows(paths: list[Path]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the name and the rows of each results file in `paths`, or of the replays in the archive `KEPT` if empty."""
    for path in paths:
        yield path.name, _frame(json.loads(path.read_text(encoding="utf-8")))
    if not paths:
        with zipfile.ZipFile(KEPT) as archive:
            for name in archive.namelist():
                if name.startswith(("replay-", "graph-")):
                    yield name, _frame(json.load(io.BytesIO(archive.read(name))))


def timed_cases(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the cases with captured and replayed times, with their errors.

    Adds the columns `difference_us`; `relative`; `time_us`, captured in all calls; and `points`, the share of the error
    in percent of the captured time of all cases.
    """
    timed = rows[(rows["status"] == "ok") & (rows["captured_us"] > 0) & rows["median_us"].notna()]
    difference = timed["median_us"] - timed["captured_us"]
    time_us = timed["count"] * timed["captured_us"]
    return timed.assign(
        difference_us=difference,
        relative=difference / timed["captured_us"],
        time_us=time_us,
        points=100 * timed["count"] * difference.abs() / time_us.sum(),
    )


def errors_by_size(timed: pd.DataFrame) -> pd.DataFrame:
    """Return the errors of the timed cases in groups by captured time, one row per group."""
    groups = timed.groupby(pd.cut(timed["captured_us"], EDGES_US, right=False), observed=True)
    return pd.DataFrame(
        {
            "cases": groups.size(),
            "calls": groups["count"].sum(),
            "share of time %": 100 * groups["time_us"].sum() / timed["time_us"].sum(),
            "difference us: median": groups["difference_us"].median(),
            "p90": groups["difference_us"].quantile(0.9),
            "relative %: median": 100 * groups["relative"].median(),
            "error, points": groups["points"].sum(),
        }
    )


def weighted_quantile(values: pd.Series[float], weights: pd.Series[float], share: float) -> float:
    """Return the smallest value up to which the values have a `share` (0 to 1) of the sum of all weights."""
    order = np.argsort(values.to_numpy())
    sums = np.cumsum(weights.to_numpy()[order])
    return float(values.to_numpy()[order][np.searchsorted(sums, share * sums[-1])])


def _frame(results: Any) -> pd.DataFrame:
    return pd.DataFrame([{name: row[name] for name in COLUMNS} for row in results["results"]])


if __name__ == "__main__":
    main()
