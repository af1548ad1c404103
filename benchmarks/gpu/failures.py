"""Check that each failing case costs one row."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from gpu.programs import capture_calls, expect_ok, replay_rows, row_of
from gpu.step import Place, Step, expect
from opgrip.replay.results.results import RAN

HUGE = 1 << 30  # size of a tensor that does not fit under `LIMIT`
LIMIT = "512MB"
WAITING, GOOD = "aten.nonzero.default", "aten.add.Tensor"


def check_assert(place: Place) -> None:
    """Check that an assertion that fails on the device costs only its row, although it ends the use of the device."""
    flag, x = torch.ones(1, dtype=torch.bool), torch.ones(100)
    trace = capture_calls(place, lambda: torch._assert_async(flag), lambda: x + 1, lambda: x * 2)
    rows = replay_rows(place, trace, values=["zeros"])
    bad = row_of(rows, "aten._assert_async.default")
    place.note(error=bad.error)
    expect(bad.status not in RAN, "a call that fails on the device is ok")
    expect_ok([row_of(rows, GOOD), row_of(rows, "aten.mul.Tensor")])


def check_memory(place: Place) -> None:
    """Check that a call that needs too much memory does not affect the next."""
    x = torch.ones(100)
    free = _free_bytes(place)
    trace = capture_calls(place, lambda: torch.empty(HUGE // 4), lambda: x + 1)
    rows = replay_rows(place, trace, memory_limit=LIMIT)
    bad = row_of(rows, "aten.empty.memory_format")
    place.note(error=bad.error)
    expect(bad.status not in RAN, "a call that wants more memory than it may is ok")
    expect("memory" in (bad.error or ""), f"its error is {bad.error}")
    expect_ok([row_of(rows, GOOD)])
    kept = free - _free_bytes(place)
    place.note(kept_bytes=kept)
    expect(kept < HUGE // 4, f"{kept / 1e6:.0f} MB are not given back")


def check_waiting_call(place: Place, mode: str) -> None:
    """Check that a call that waits for the device fails in a graph without affecting later captures."""
    trace = _waiting_trace(place)
    rows = replay_rows(place, trace, **({"exec_mode": "graph"} if mode == "eager" else {"mode": [mode]}))
    bad = row_of(rows, WAITING, mode)
    place.note(status=bad.status, error=bad.error)
    expect(bad.status not in RAN, f"a graph of {WAITING} is ok")
    expect_ok([row_of(rows, operator, mode) for operator in (GOOD, "aten.mul.Tensor", "aten.sin.default")])


def _waiting_trace(place: Place) -> Path:
    x = torch.ones(100)
    return capture_calls(place, lambda: x.nonzero(), lambda: x + 1, lambda: x * 2, lambda: x.sin())


def _free_bytes(place: Place) -> int:
    return int(place.module.mem_get_info(place.module.current_device())[0])


STEPS = (
    Step("a device-side assert costs one row", check_assert),
    Step("running out of memory costs one row", check_memory),
    Step("a call that --exec-mode graph cannot capture costs one row", partial(check_waiting_call, mode="eager")),
    Step(
        "a call that --mode cudagraph cannot capture costs one row",
        partial(check_waiting_call, mode="cudagraph"),
        needs_cuda="its graphs are CUDA's",
    ),
)
