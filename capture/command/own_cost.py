"""Cost of recording a call on this machine: the time that a capture adds to a loop of small operators."""

from __future__ import annotations

import tempfile
from pathlib import Path
from time import perf_counter_ns

import numpy as np
import torch

from opgrip.capture.session.capture import Capture
from opgrip.platform.machine import measure_once
from opgrip.traces.analysis.longtail import CaptureCost
from opgrip.traces.table.trace import load

ROUNDS, WARMUP = 300, 30
LOW = 0.25
"""quantile of the times that is used, since other work of the machine only makes times longer"""


def own_cost() -> CaptureCost:
    """Return the cost of recording a repeated call, as measured now or earlier."""
    operator_ns, between_ns = measure_once("cost of capture", "cpu", _measure)
    return CaptureCost(operator_ns, between_ns)


@torch.no_grad()
def _measure() -> tuple[float, float]:
    """Return the time that a capture adds to a small operator, and between two operators, in ns.

    Without a capture only the sum of both is known. Operator time beyond that sum must be added to the operators; the
    rest counts as time between them.
    """
    boxes = torch.rand(16, 4)
    for _ in range(WARMUP):
        _small_operators(boxes)
    plain = [_time(boxes) for _ in range(ROUNDS)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "loop.jsonl"
        with Capture(path):
            for _ in range(ROUNDS):
                _small_operators(boxes)
        calls = load(path).calls
    count = len(calls) // ROUNDS
    starts = calls["start_ns"].to_numpy()[WARMUP * count :].reshape(-1, count)
    durations = calls["duration_ns"].to_numpy()[WARMUP * count :].reshape(-1, count)
    # from the first start to the last, with one gap for each operator
    spans = (starts[:, -1] - starts[:, 0]) / (count - 1)
    without = float(np.quantile(plain, LOW)) / count
    inside = float(np.quantile(durations.mean(axis=1), LOW))
    operator_ns = max(0.0, inside - without)
    return operator_ns, max(0.0, float(np.quantile(spans, LOW)) - without - operator_ns)


def _time(boxes: torch.Tensor) -> int:
    start = perf_counter_ns()
    _small_operators(boxes)
    return perf_counter_ns() - start


def _small_operators(boxes: torch.Tensor) -> torch.Tensor:
    """Run views and arithmetic on a few boxes, as a box coder does."""
    corners, sizes = boxes[:, :2], boxes[:, 2:]
    centers = (corners + sizes) * 0.5
    sizes = (sizes - corners).abs().clamp(min=0.1)
    scaled = centers * sizes + corners
    return torch.cat([scaled - sizes, scaled + sizes], dim=1).view(-1, 4)
