"""Timing of a model's step as its capture runs it, but without capture.

python -m opgrip.zoo.step_time ARGUMENTS
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from statistics import median
from time import perf_counter

STEPS = 5
ENOUGH_S = 20.0
"""time after which no further step is started"""


def step_ms(arguments: Sequence[str]) -> float:
    """Return the median time of a step in ms, after a first one, for the model that `opcapture` arguments describe."""
    from opgrip.capture.command.capture_options import make_parser
    from opgrip.capture.command.model_steps import build, run_step
    from opgrip.cli.progress import Reporter

    args = make_parser().parse_args(list(arguments))
    program = build(args, Reporter("opgrip zoo"))
    run_step(program, program.inputs())
    seconds: list[float] = []
    while len(seconds) < STEPS and sum(seconds) < ENOUGH_S:
        inputs = program.inputs()
        start = perf_counter()
        run_step(program, inputs)
        seconds.append(perf_counter() - start)
    return median(seconds) * 1e3


if __name__ == "__main__":
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        time_ms = step_ms(sys.argv[1:])
    print(json.dumps({"step_ms": time_ms}))
