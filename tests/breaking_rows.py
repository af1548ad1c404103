"""Runs the functions that break compilers under the modes that the command line names, and prints their rows as JSON.

A program of its own, since a compiler may crash, and forks are only safe where torch has no threads yet.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from breaking_functions import BREAKING
from settings import settings_of

from opgrip.replay.cases.functions import function_case
from opgrip.replay.cases.sources import CaseSet
from opgrip.replay.timing.timing_options import WARM
from opgrip.replay.workers.ahead import make_ahead, rows_ahead
from opgrip.replay.workers.job import Job, Loaded
from opgrip.replay.workers.supervisor import supervise


def main(modes: list[str], names: list[str]) -> None:
    torch.set_num_threads(1)
    chosen = {name: BREAKING[name] for name in names or BREAKING}
    cases = [function_case(function, args, number=number) for number, (function, args) in enumerate(chosen.values())]
    with tempfile.TemporaryDirectory() as store:
        settings = settings_of(iterations=3, mode=["eager", *modes], cache=WARM, store=Path(store), detail=True)
        loaded = Loaded(CaseSet(cases), cases, settings, [])
        job = Job("")
        known = make_ahead(job, loaded, rows_ahead(loaded), 2, 300, may_fork=True)
        for rows in supervise(job, loaded, 300, (), True, known):
            for row in rows:
                print(json.dumps(row.to_plain()))


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2:])
