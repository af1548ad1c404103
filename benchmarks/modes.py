"""Run every mode of this machine on each family of operators, and print which calls it can run and how fast.

python benchmarks/modes.py                                    # the shipped trace, all modes; writes results.json
python benchmarks/modes.py --results results.json             # the table of existing results
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console

from opgrip.errors import UserError
from opgrip.replay import Results
from opgrip.replay.modes import find_mode, modes

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = {
    "convolution": ("convolution*",),
    "matrix product": ("addmm", "mm", "bmm", "baddbmm", "linear"),
    "normalization, softmax": ("*norm*", "*softmax*"),
    "pooling, resizing": ("*pool*", "upsample*"),
    "indexing": ("index*", "gather", "masked*", "nonzero", "where", "select*scatter", "scatter*"),
    "order": ("sort*", "topk", "argsort", "max.dim", "unique*"),
    "reduction": ("sum*", "mean*", "max", "min", "any", "all", "amax", "amin", "argmax", "cumsum*", "prod"),
    "view": ("view*", "_unsafe_view", "permute", "slice", "select", "expand*", "unsqueeze*", "squeeze*", "t", "detach*")
    + ("transpose*", "split*", "unbind*", "alias", "as_strided", "reshape", "unfold", "lift_fresh*"),
    "creation, copy": ("empty*", "new_*", "zeros*", "ones*", "full*", "arange*", "clone", "_to_copy", "copy_", "cat")
    + ("stack", "fill*", "zero_", "scalar_tensor", "_local_scalar_dense", "meshgrid*", "rand*"),
    "extension": ("*:*",),
}
REST = "elementwise"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--trace", type=Path, default=ROOT / "traces/faster_rcnn.jsonl")
    options.add_argument("--mode", type=lambda text: text.split(","), default=available())
    options.add_argument("--results", type=Path)
    options.add_argument("--output", type=Path, default=Path("modes.json"))
    args, rest = options.parse_known_args()
    if args.results is None:
        opreplay = Path(sys.executable).parent / "opreplay"
        mode_options = ["--mode", ",".join(args.mode), "--threads", "1", "-o", args.output, "-f"]
        subprocess.run([opreplay, args.trace, *mode_options, *rest], check=True, stdout=subprocess.DEVNULL)
    print_table(Results.load(args.results or args.output).frame)


def available() -> list[str]:
    """Return the modes that can run here, without the debugging fallback."""
    names = []
    for name in modes.names():
        try:
            mode, _ = find_mode(name)
        except UserError:
            continue
        if name != "eager" and "cpu" in mode.devices:
            names.append(name)
    return names


def print_table(rows: pd.DataFrame) -> None:
    """Print one line per family, one column per mode: the number of ok cases, and their geometric mean speed-up."""
    rows = rows.assign(family=[family_of(op) for op in rows["op"]])
    names = [mode for mode in rows["mode"].unique() if mode != "eager"]
    console = Console(width=200, highlight=False)
    print(f"| operators | cases | {' | '.join(names)} |")
    print(f"|{' --- |' * (2 + len(names))}")
    for family in [*FAMILIES, REST, "all"]:
        own = rows if family == "all" else rows[rows["family"] == family]
        if own.empty:
            continue
        cells = [cell(own[own["mode"] == mode]) for mode in names]
        print(f"| {family} | {own['case'].nunique()} | {' | '.join(cells)} |")
    console.print(rows.groupby(["mode", "status"]).size().unstack(fill_value=0))


def cell(rows: pd.DataFrame) -> str:
    counts = rows["status"].value_counts()
    failures = [f"{count} {status}" for status, count in counts.items() if status not in ("ok", "unsupported")]
    ratios = rows[(rows["status"] == "ok") & rows["ratio"].notna()]["ratio"]
    gain = f" {np.exp(-np.log(ratios).mean()):.2f}x" if len(ratios) else ""
    return ", ".join([f"{counts.get('ok', 0)}{gain}", *failures])


def family_of(op: str) -> str:
    parts = op.split(".")
    packet = parts[1].removesuffix("_") if len(parts) == 3 else op
    names: Sequence[str] = (op, packet, ".".join(parts[1:]), f"{packet}_")
    for family, patterns in FAMILIES.items():
        if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
            return family
    return REST


if __name__ == "__main__":
    main()
