"""Script that runs the functions that break compilers under given modes, and prints their rows as JSON.

It is a separate program, since a compiler may crash, and forks are only safe while torch has no threads.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from breaking_functions import BREAKING
from settings import settings_of

from opgrip.replay.cases.functions import function_case
from opgrip.replay.cases.sources import CaseSet
from opgrip.replay.run.worker import make_ahead, rows_ahead, run_cases
from opgrip.replay.timing.timing_options import WARM


def main(modes: list[str], names: list[str]) -> None:
    torch.set_num_threads(1)
    chosen = {name: BREAKING[name] for name in names or BREAKING}
    cases = [function_case(function, args, number=number) for number, (function, args) in enumerate(chosen.values())]
    with tempfile.TemporaryDirectory() as store:
        workload = settings_of(
            iterations=3, mode=["eager", *modes], cache=WARM, store=Path(store), detail=True, timeout=300
        )
        workload = replace(workload, source_cases=CaseSet(cases), cases=cases)
        known = make_ahead(workload, rows_ahead(workload), 2, may_fork=True)
        for rows in run_cases(workload, may_fork=True, cached_rows=known):
            for row in rows:
                print(json.dumps(row.to_plain()))


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2:])
