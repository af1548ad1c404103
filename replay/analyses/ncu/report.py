"""A report of ncu: the kernels in it, by its own Python module where that is installed, else as CSV.

CSV: https://docs.nvidia.com/nsight-compute/NsightComputeCli/index.html, "Console Output"; the raw page has a column
a metric, and a second line of units.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from opgrip.errors import UserError
from opgrip.replay.analyses.profiling.programs import last_words

MODULES = ("extras/python", "../nsight-compute*/extras/python", "../../nsight-compute*/extras/python")
"""Where the module is, from the folder of the program or of a script that starts it."""
SCRIPT = Path(__file__).with_name("extras.py")
TO_CSV = ("--csv", "--page=raw", "--print-units=base")
FIRST, KERNEL, RANGES = "ID", "Kernel Name", "Range:PL_Type"
"""The first column, that of kernels' names, and what is in the headings of columns of NVTX ranges."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A launch of a kernel, as ncu saw it.

    Attributes
    ----------
    ranges : text with the names of the NVTX ranges that it was launched in
    metrics : in ns, bytes and percent
    """

    name: str
    ranges: str
    metrics: Mapping[str, float]


def read_report(binary: str, report: Path, requested_metrics: Sequence[str]) -> list[Kernel]:
    """The kernels of a report, with these metrics where they were measured.

    Parameters
    ----------
    binary : the path of ncu

    Raises
    ------
    UserError : where it is no report
    """
    folder = module_folder(binary)
    if folder is not None:
        script_command = [sys.executable, str(SCRIPT), str(folder), str(report), *requested_metrics]
        done = _run(script_command)
        if done.returncode == 0:
            return [Kernel(**json.loads(line)) for line in done.stdout.splitlines()]
    done = _run([binary, f"--import={report}", *TO_CSV])
    if done.returncode:
        raise UserError(f"ncu cannot read its report: {last_words(done)}", "update it")
    return list(kernels_of_csv(done.stdout, requested_metrics))


def module_folder(binary: str) -> Path | None:
    """The folder of `ncu_report.py` that belongs to this ncu; None where there is none."""
    beside = Path(binary).resolve().parent
    module_paths = (path for pattern in MODULES for path in sorted(beside.glob(f"{pattern}/ncu_report.py"))[::-1])
    return next((path.parent.resolve() for path in module_paths), None)


def kernels_of_csv(text: str, requested_metrics: Sequence[str]) -> Iterator[Kernel]:
    """The kernels in what ncu prints of a report's raw page; none where it holds none.

    Raises
    ------
    UserError : where it is something else
    """
    lines = text.splitlines(keepends=True)
    # words of ncu itself come first
    start = next((place for place, line in enumerate(lines) if line.lstrip("\ufeff").startswith(f'"{FIRST}"')), None)
    if start is None:
        if any(line.strip() and not line.startswith("==") for line in lines):
            raise UserError("ncu prints its report in a form that opgrip does not know", "use another version")
        return
    rows = csv.reader(lines[start:])
    heading = [name.lstrip("\ufeff") for name in next(rows)]
    if KERNEL not in heading:
        raise UserError(f"what ncu prints of its report has no column {KERNEL!r}", "use another version")
    next(rows, None)
    for cells in rows:
        row = dict(zip(heading, cells, strict=False))
        if row.get(FIRST, "").isdigit():
            ranges = "\n".join(cell for name, cell in row.items() if RANGES in name)
            yield Kernel(row.get(KERNEL, ""), ranges, dict(_metrics(row, requested_metrics)))


def _metrics(row: Mapping[str, str], requested_metrics: Sequence[str]) -> Iterator[tuple[str, float]]:
    for name in requested_metrics:
        with suppress(ValueError):
            yield name, float(row.get(name, "").replace(",", ""))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise UserError(f"{command[0]} cannot be run: {error.strerror}", "see --ncu-bin") from error
