"""Measure every sample in eager and, in its first configuration, compiled; write docs/samples.md.

python benchmarks/samples.py                            # measures all, writes samples.jsonl
python benchmarks/samples.py --compile-only             # fills the caches of compilers for a later run
python benchmarks/samples.py --results samples.jsonl    # the page from existing measurements
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.platform.machine import processor
from opgrip.replay.cases.sources.samples import SHIPPED
from opgrip.replay.command.run_requests import request_with
from opgrip.replay.reports.cells import whole_cells
from opgrip.replay.run.worker import make_ahead, rows_ahead, run_cases
from opgrip.replay.run.workload import load_workload
from opgrip.replay.timing.timing_options import WARM
from opgrip.samples import Sample, Tag, samples

ROOT = Path(__file__).resolve().parent.parent
COMPILED = "compile"
TIMEOUT_S = 300.0
HEAD = "| sample | inputs | operators | eager us | compiled us | speed-up | tags | from |"
RULE = "|---|---|--:|--:|--:|--:|---|---|"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--results", type=Path)
    options.add_argument("--compile-only", action="store_true")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options.add_argument("--page", type=Path, default=ROOT / "docs/samples.md")
    args = options.parse_args()
    results = args.results or Path("samples.jsonl")
    if args.results is None:
        firsts = {case for case, (sample, name) in enumerate(configured()) if name == next(iter(sample.configurations))}
        others = set(range(len(configured()))) - firsts
        rows = list(measured(("eager", COMPILED), others, args.jobs, args.compile_only))
        if args.compile_only:
            return
        rows += measured(("eager",), firsts, args.jobs, False)
        results.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    frame = pd.DataFrame(json.loads(line) for line in results.read_text(encoding="utf-8").splitlines())
    args.page.write_text("\n".join(page(frame)) + "\n", encoding="utf-8")


def configured() -> list[tuple[Sample, str]]:
    """Return samples and configurations in the order of the cases."""
    return [(sample, name) for sample in samples().values() for name in sample.configurations]


def measured(
    modes: tuple[str, ...], without: Collection[int], jobs: int, compile_only: bool
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the cases that are not left out; none with `compile_only`.

    without : numbers of the cases to leave out
    jobs : number of processes that compile
    """
    request = request_with(SHIPPED, mode=modes, threads=1, cache=WARM, budget=1.0, timeout=TIMEOUT_S)
    workload = load_workload(request)
    ready_results = make_ahead(workload, rows_ahead(workload, without), jobs)
    if not compile_only:
        for rows in run_cases(workload, without, cached_rows=ready_results):
            yield from whole_cells(rows)


def page(rows: pd.DataFrame) -> Iterator[str]:
    """Yield the lines of docs/samples.md."""
    machine = ", ".join([processor("cpu")[1], f"{os.cpu_count()} cores", f"torch {torch.__version__}"])
    own = {(int(row["case"]), row["mode"]): row for row in rows.to_dict("records")}
    yield "# Samples\n"
    count = len(samples())
    yield f"This page lists the {count} long-tail functions in plain torch that ship with opgrip, in `samples/`."
    yield f"{sum(sample.has_jax() for sample in samples().values())} of them also have a JAX implementation."
    yield "`opgrip samples show NAME` prints a sample, `opreplay sample:NAME --mode eager,compile` runs it.\n"
    yield f"Times are medians on one thread of {machine}, with warm caches; *compiled* is torch.compile."
    yield "*Operators* is the number of operators that a call launches in"
    yield "eager mode. `python benchmarks/samples.py` writes this page.\n"
    for tag in Tag:
        yield f"- `{tag.value}`: {tag.meaning}"
    for family in sorted({sample.family for sample in samples().values()}):
        yield f"\n## {family}\n\n{HEAD}\n{RULE}"
        for case, (sample, configuration) in enumerate(configured()):
            if sample.family == family:
                yield row_of(sample, configuration, own.get((case, "eager")), own.get((case, COMPILED)))


def row_of(sample: Sample, configuration: str, eager: Any, compiled: Any) -> str:
    """Return a table line; name, tags and origin are only in the line of a sample's first configuration.

    eager, compiled : rows of the configuration in eager mode, and compiled or None
    """
    first = configuration == next(iter(sample.configurations))
    ratio = None if compiled is None else compiled["ratio"]
    cells = [
        f"`{sample.name}`{' (jax)' if sample.has_jax() else ''}: {sample.summary}" if first else "",
        configuration,
        str(operators(sample, configuration)),
        time_of(eager),
        time_of(compiled),
        f"{1 / ratio:.2f}" if ratio and ratio == ratio else "",
        " ".join(sorted(tag.value for tag in sample.tags)) if first else "",
        f"[{sample.project}]({sample.url})" if first else "",
    ]
    return f"| {' | '.join(cell.replace('|', ' ') for cell in cells)} |"


def time_of(row: Any) -> str:
    """Return the median time in us of a row of results, or its status if it has none; empty without a row."""
    if row is None:
        return ""
    time = row["median_us"]
    return str(row["status"]) if time is None or time != time else f"{time:,.1f}" if time < 100 else f"{time:,.0f}"


class Counter(TorchDispatchMode):
    """Count the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return operator(*args, **(kwargs or {}))


def operators(sample: Sample, configuration: str) -> int:
    """Return the number of operators that a call of a sample in a configuration runs."""
    arguments = sample.arguments(configuration)
    torch.manual_seed(0)
    with Counter() as counter:
        sample.function(*arguments)
    return counter.count


if __name__ == "__main__":
    main()
