"""List the checks, and the measurements of a first contact, in the order in which they run: those worth most first."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from gpu import captures, devices, failures, limits, modes, profilers, ranks, times
from gpu.calls import measure_clocks, measure_device
from gpu.observers import capture_program, measure_program
from gpu.replays import (
    measure_by_ncu,
    measure_ceilings,
    measure_mode,
    measure_replay,
    measure_selections,
    measure_sequence,
    measure_zoo,
)
from gpu.step import Step
from gpu.step_costs import explain_steps

STEP_MODULES = (times, captures, devices, limits, failures, ranks, profilers, modes)
CHECKS: Mapping[str, Step] = {step.name: step for module in STEP_MODULES for step in module.STEPS}
ON_CUDA = "it is for CUDA"
TRANSFORMERS = {"bert", "llama", "gpt2"}


def _program(name: str, timeout_s: float = 60.0) -> Step:
    modules = ("transformers",) if name in TRANSFORMERS else ()
    return Step(f"program:{name}", partial(measure_program, name=name), timeout_s, "", 25.0, modules)


def _explained(name: str) -> Step:
    modules = ("transformers",) if name in TRANSFORMERS else ()
    return Step(f"steps:{name}", partial(explain_steps, name=name), 60.0, "", 25.0, modules)


def _capture(name: str) -> Step:
    return Step(f"trace:{name}", partial(capture_program, name=name), 45.0, "", 20.0, ("transformers",))


def _replay(name: str) -> Step:
    return Step(f"replay:{name}", partial(measure_replay, name=name), 60.0, "", 15.0)


def _mode(name: str, mode: str, top: int, timeout_s: float) -> Step:
    run = partial(measure_mode, name=name, mode=mode, top=top)
    return Step(f"modes:{name}-{mode}", run, timeout_s, ON_CUDA, 20.0)


def _sequence(name: str) -> Step:
    return Step(f"sequence:{name}", partial(measure_sequence, name=name), 70.0, "", 25.0)


def _step_graphs(name: str) -> Step:
    run = partial(measure_sequence, name=name, exec_mode="graph")
    return Step(f"step-graphs:{name}", run, 70.0, "", 20.0)


PLANS: Mapping[str, tuple[Step, ...]] = {
    # 285 s on an H100
    "first": (
        Step("facts", measure_device, 40.0),
        Step("clocks", measure_clocks, 60.0),
        _program("bert"),
        _replay("bert"),
        _program("detector", 80.0),
        _replay("detector"),
        _program("llama"),
        _replay("llama"),
        Step("selections:llama", partial(measure_selections, name="llama"), 60.0, "", 25.0),
        _program("resnet"),
        _replay("resnet"),
        _sequence("bert"),
        _step_graphs("bert"),
    ),
    # 450 s on an H100, with its own traces
    "second": (
        Step("zoo", measure_zoo, 110.0, "", 30.0),
        _capture("bert"),
        _mode("bert", "cudagraph", 24, 50.0),
        _mode("bert", "compile", 24, 90.0),
        _capture("llama"),
        Step("ncu:llama", partial(measure_by_ncu, name="llama"), 110.0, ON_CUDA, 60.0),
        Step("failures:assert", failures.check_assert, 70.0, "", 30.0),
        Step("failures:memory", failures.check_memory, 60.0, "", 25.0),
        Step("roofline", measure_ceilings, 50.0, "", 15.0),
        Step("graph:llama", partial(measure_replay, name="llama", top=60, exec_mode="graph"), 40.0, "", 20.0),
        _mode("bert", "reduce-overhead", 12, 70.0),
        _sequence("llama"),
        Step("failures:graph", partial(failures.check_waiting_call, mode="eager"), 60.0, "", 25.0),
        Step("collective", ranks.check_collective, 30.0, ON_CUDA, 10.0),
        _program("gpt2"),
        _replay("gpt2"),
    ),
    # where the time of captured steps goes
    "third": (_explained("llama"), _explained("bert"), _explained("resnet")),
}
MEASUREMENTS: Mapping[str, Step] = {step.name: step for plan in PLANS.values() for step in plan}
STEPS: Mapping[str, Step] = {**CHECKS, **MEASUREMENTS}
