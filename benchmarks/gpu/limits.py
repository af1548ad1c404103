"""Check the machine's limits: roofline and energy."""

from __future__ import annotations

from time import perf_counter

import torch

from gpu.programs import capture_calls, expect_ok, replay_rows
from gpu.step import NotHereError, Place, Step, expect, expect_between
from opgrip.platform.machine import find_gpu
from opgrip.replay.analyses.roofline import LimitColumns
from opgrip.replay.operators.devices import with_index
from opgrip.replay.run.energy import EnergyColumns

MOST_OF_LIMIT = 1.1  # a peak is a measurement too: a row may be slightly better
LEAST_OF_LIMIT = 0.3  # share that a large product or copy reaches
SECONDS = 1.0
NEAR = 0.3  # relative difference allowed between two energy readings: clocks and temperature change between them


def check_roofline(place: Place) -> None:
    """Check that large products in each dtype, and a copy, come close to the machine's limits and not above."""
    device = place.device
    x, block = torch.rand(4096, 4096, device=device), torch.rand(1 << 26, device=device)
    half = x.bfloat16()
    trace = capture_calls(place, lambda: torch.mm(x, x), lambda: torch.mm(half, half), block.clone)
    rows = replay_rows(place, trace, roofline=True, exec_mode="events", timeout=120)
    expect_ok(rows)
    shares = {f"{row.op} {row.shapes}": LimitColumns.of(row).of_limit for row in rows}
    place.note(**shares)
    for name, share in shares.items():
        expect(share is not None, f"{name} has no limit")
        expect_between(share or 0.0, LEAST_OF_LIMIT, MOST_OF_LIMIT, f"of_limit of {name}")


def check_energy(place: Place) -> None:
    """Check the energy that `--energy` reports for a matrix product against NVML's counter during the same product."""
    gpu = find_gpu(with_index(place.device))
    if gpu is None:
        raise NotHereError("NVML is not available: pip install nvidia-ml-py")
    if gpu.energy_mj() is None:
        raise NotHereError("this GPU, or this part of one, counts no energy")
    x = torch.rand(4096, 4096, device=place.device)
    trace = capture_calls(place, lambda: torch.mm(x, x))
    row = replay_rows(place, trace, energy=True)[0]
    expect_ok([row])
    columns = EnergyColumns.of(row)
    torch.cuda.synchronize()
    before, end, runs = gpu.energy_mj() or 0.0, perf_counter() + SECONDS, 0
    while perf_counter() < end:
        for _ in range(10):
            torch.mm(x, x)
        torch.cuda.synchronize()
        runs += 10
    expected = ((gpu.energy_mj() or 0.0) - before) / runs
    place.note(energy_mj=columns.energy_mj, expected_mj=expected, idle_w=columns.idle_w)
    expect(columns.energy_mj is not None, "the column energy_mj is empty")
    expect_between(columns.energy_mj or 0.0, (1 - NEAR) * expected, (1 + NEAR) * expected, "energy_mj of a product")


STEPS = (
    Step("--roofline", check_roofline, 180.0, "the ceilings of other accelerators are not judged"),
    Step("--energy against NVML's counter", check_energy, needs_cuda="energy is read by NVML"),
)
