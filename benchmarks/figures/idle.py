"""Measure the cost of an idle agent."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from figures.figure import Experiment, Figure, Rounds, median_of_ratios
from opgrip.capture.on_demand.agent import Agent
from opgrip.capture.on_demand.protocol import RecordingRequest
from opgrip.capture.on_demand.settings import AgentSettings

OPERATORS = 2_500
SETTLE_S = 0.01
RECORDED_EVERY = 20  # number of pairs per recording: the effects of a recording would slow the pairs after it
IDLE = Figure(
    "service: idle agent over none",
    "processor time of tiny operators with an agent, in a process that has recorded, over that without one",
    statistic=median_of_ratios,
)


def measure_idle(rounds: int) -> Sequence[Rounds]:
    """Measure operators with and without an idle agent, alternating in one process on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return [idle_pairs(rounds, OPERATORS, Path(folder))]
    finally:
        torch.set_num_threads(threads)


def idle_pairs(pairs: int, operators: int, folder: Path) -> list[tuple[float, float]]:
    """Measure `pairs` times: return the processor seconds of `operators` operators with an agent, with its own, and
    without an agent.

    folder : folder for the agent's recordings
    """
    x = torch.ones(4)
    net = nn.ReLU().eval()

    def work() -> float:
        # wait until threads that begin and end here have done so
        time.sleep(SETTLE_S)
        # all threads of this process: other processes do not count, and the agent does
        start = time.process_time()
        for _ in range(operators):
            x.add(1)
        return time.process_time() - start

    work()
    measured = []
    for pair in range(pairs):
        times = {}
        for with_agent in (True, False) if pair % 2 else (False, True):
            if with_agent:
                agent = Agent(AgentSettings("benchmark", str(folder / "idle-%n.jsonl")))
                agent.start()
                if pair % RECORDED_EVERY == 0:
                    _record(agent, net, x, folder / f"idle-{pair}.jsonl")
                times[True] = work()
                agent.close()
            else:
                times[False] = work()
        measured.append((times[True], times[False]))
    return measured


def _record(agent: Agent, net: nn.Module, x: torch.Tensor, path: Path) -> None:
    """Let an agent record one step of `net` on the input `x` to the file `path`."""
    armed = threading.Event()
    request = RecordingRequest(str(path), steps=1, warmup=0)
    thread = threading.Thread(target=agent.record, args=(request, lambda fields: armed.set()))
    thread.start()
    armed.wait()
    net(x)
    thread.join()


SERVICE = (Experiment("idle", (IDLE,), measure_idle, rounds=400),)
