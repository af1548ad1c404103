"""Check captures: programs run as if unobserved, and their traces have all calls."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu.kernels import device_records
from gpu.programs import last_line, run_command
from gpu.step import NotHereError, Place, Step, expect, expect_between
from opgrip.capture import Capture
from opgrip.capture.program.capture_choices import AUTO, EVENTS
from opgrip.replay import replay
from opgrip.replay.operators.devices import graph_class
from opgrip.traces import Trace, load
from opgrip.traces.table.call_source import BY_KERNELS

# variables that hide devices from a process that has not initialized them yet
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "sim": "SIM_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
LAUNCHES = 20
FLUSHED_S = 1.2  # time in which a capture's thread wakes up twice

HIDING = """
    import os
    os.environ["{variable}"] = ""
    import torch
    torch.ones(3).sin()
    try:
        torch.ones(3, device="{device}").cpu()
        print("the device is seen")
    except Exception as error:
        print("the device is hidden:", error)
"""
FORKING = """
    import os
    import torch
    torch.ones(3).sin()
    child = os.fork()
    if child == 0:
        torch.ones(3, device="{device}").cos().cpu()
        print("the child has used the device", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
LOADING = """
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Images(Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, place):
            return torch.ones(4).add(place)

    if __name__ == "__main__":
        scale = torch.ones(4, device="{device}")
        for batch in DataLoader(Images(), batch_size=2, num_workers=2):
            (batch.to("{device}") * scale).sum().item()
"""


def check_start(place: Place) -> None:
    """Check that a script can hide the device in its first line, because the capture has not initialized it."""
    variable = VISIBLE.get(place.kind)
    if variable is None:
        raise NotHereError(f"nothing is known to hide {place.kind} from a process")
    _, said = _captured_script(place, HIDING.format(variable=variable, device=place.device))
    expect("the device is hidden" in said, f"{variable}, as the script set it, was ignored")


def check_forks(place: Place) -> None:
    """Check that a fork of a captured program can initialize the device, because the program has not."""
    _, said = _captured_script(place, FORKING.format(device=place.device))
    expect("the child has used the device" in said, "a fork of a captured program cannot start the device")


def check_workers(place: Place) -> None:
    """Check that each DataLoader worker, forked from a process that uses the device, has a trace."""
    traces, said = _captured_script(place, LOADING.format(device=place.device))
    calls = {path.name: list(load(path, partial=False).calls["op"]) for path in traces}
    workers = [name for name, operators in calls.items() if operators.count("aten.add.Tensor") == 4]
    place.note(traces=len(calls))
    expect(len(workers) == 2, f"of two workers {len(workers)} have all of their calls in a trace")
    expect("Warning" not in said, f"it warned: {said.strip().splitlines()[-1:]}")


def check_first_calls(place: Place) -> None:
    """Check that the first calls of a capture have a device time: the first kernels' records may be lost."""
    x, trace = torch.ones(1000, device=place.device), place.folder / "first.jsonl"
    place.module.synchronize()
    with Capture(trace):
        for _ in range(5):
            x.sin()
        x.view(2, -1)
    records = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    kernels = [record for record in records if record["type"] == "kernels"]
    times = load(trace, partial=False).calls["device_ns"].tolist()
    place.note(device_ns=times, kernels=kernels, torch=torch.__version__)
    expect(0.0 not in times[:5], f"a call that launched a kernel has a device time of 0: {times}")
    expect(times[0] > 0, f"the first call has no device time; ns of all, and kernels: {times}, {kernels}")


def check_graph(place: Place, device_time: str) -> None:
    """Check the trace of a program that captures a CUDA graph, for longer than the writing thread sleeps, and launches
    it: it has the graph's calls once, each launch, and device times of both.

    device_time : option of the capture: `events` or `kernels`
    """
    module, trace = place.module, place.folder / "graph.jsonl"
    kind = graph_class(place.device)
    if kind is None:
        raise NotHereError(f"{place.kind} has no graphs")
    elements = 1 << (20 if place.kind == "cuda" else 12)
    x, unsorted = torch.ones(1000, device=place.device), torch.rand(elements, device=place.device)
    unsorted.sort()
    module.synchronize()
    with Capture(trace, device_time=device_time) as capture:
        for _ in range(3):
            x.sin()
        unsorted.sort()
        module.synchronize()
        graph = kind()
        with module.graph(graph):
            y = x.sin()
            time.sleep(FLUSHED_S)
            ordered, _ = unsorted.sort()
            z = y.view(10, 100).cos()
        x.fill_(2)
        graph.replay()
        module.synchronize()
        started = time.perf_counter()
        for _ in range(LAUNCHES - 1):
            graph.replay()
        launch_us = (time.perf_counter() - started) / (LAUNCHES - 1) * 1e6
        x.sin()
        module.synchronize()
    started = time.perf_counter()
    for _ in range(LAUNCHES - 1):
        graph.replay()
    native_us = (time.perf_counter() - started) / (LAUNCHES - 1) * 1e6
    module.synchronize()
    place.note(launch_us=launch_us, native_launch_us=native_us, failure=capture.failure and str(capture.failure))
    _note_graph_records(place, trace)
    expected = torch.full((1000,), 2.0).sin().cos()
    expect(torch.allclose(z.flatten().cpu(), expected, rtol=1e-4), "the graph gives other results under a capture")
    expect(torch.equal(ordered.cpu(), unsorted.cpu().sort()[0]), "the graph sorts wrongly under a capture")
    expect(capture.dropped == 0, f"{capture.dropped} calls were dropped")
    _check_launches(place, load(trace, partial=False), device_time, graph)


def _note_graph_records(place: Place, trace: Path) -> None:
    """Note the records of graphs in the file `trace`: calls of graphs, launches and kernels.

    place : device of the step, and file in which the results are noted
    """
    records = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    ops = {record["id"]: record["op"] for record in records if record["type"] == "signature"}
    graphs = [record for record in records if record["type"] == "graph"]
    times = [record for record in records if record["type"] == "graph_times"]
    launched = {record["signature"] for record in graphs}
    launches = [
        {name: record[name][place] for name in ("device_ns", "duration_ns", "streams") if record.get(name)}
        for record in records
        if record["type"] == "calls"
        for place, number in enumerate(record["signature"])
        if number in launched
    ]
    later = [record["device_ns"] for record in records if record["type"] == "device_times"]
    kernels = [
        (ops[record["signature"]], record["names"], record["launches"], record["device_ns"])
        for record in records
        if record["type"] == "kernels"
    ]
    place.note(
        graphs=[[ops[number] for number in record["calls"]] for record in graphs],
        graph_times=[record["device_ns"] for record in times],
        launches=launches[:4],
        later_device_ns=later[:2],
        kernels=kernels,
    )


def _check_launches(place: Place, trace: Trace, device_time: str, graph: Any) -> None:
    """Check number and device time of the calls within and outside of launches of the graph, which `check_graph` made.

    trace : trace of those calls
    device_time : as in `check_graph`
    """
    calls = trace.calls
    by_op = {str(op): own["device_ns"].tolist() for op, own in calls.groupby("op", observed=True)}
    counts = {op: len(times) for op, times in by_op.items()}
    place.note(counts=counts, device_ns={op: times[:6] for op, times in by_op.items()})
    sines, sorts = by_op.get("aten.sin.default", []), by_op.get("aten.sort.default", [])
    expect(len(sines) == 4 + LAUNCHES, f"{len(sines)} of {4 + LAUNCHES} calls of sin are in the trace")
    expect(len(sorts) == 1 + LAUNCHES, f"{len(sorts)} of {1 + LAUNCHES} calls of sort are in the trace")
    expect(min(sines) > 0 and min(sorts) > 0, f"device times in ns of sin {sines[:6]}, of sort {sorts[:6]}")
    views = by_op.get("aten.view.default", [])
    expect(max(views, default=0) == 0, f"a view in a graph has a device time: {views[:3]} ns")
    if place.kind != "cuda":
        return
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(10):
            graph.replay()
        place.module.synchronize()
    kineto_us = sum(kernel.us for kernel in device_records(profiler)) / 10
    launched = calls[calls["duration_ns"] == 0]
    launch_us = float(launched["device_ns"].sum()) / LAUNCHES / 1e3
    facts = {graph.split for graph in trace.source.graphs.graphs.values()}
    place.note(kineto_us=kineto_us, device_us_of_launch=launch_us, split=sorted(facts))
    expect_between(launch_us / kineto_us, 0.8, 1.5, "a launch's device time divided by kineto's")
    if device_time == AUTO:
        expect_between(sorts[-1] / sorts[0], 0.5, 1.5, "time of sort in a launch divided by its time outside")
        expect(facts == {BY_KERNELS}, f"the time of launches is divided {facts}")


def check_side_stream(place: Place) -> None:
    """Check that values written by a side stream are recorded, without waiting for them."""
    module, trace = place.module, place.folder / "streams.jsonl"
    table, index = torch.rand(50, 3, device=place.device), torch.arange(40, device=place.device)
    sleep: Callable[[int], None] | None = getattr(module, "_sleep", None)
    with Capture(trace):
        side = module.Stream()
        side.wait_stream(module.current_stream())
        with module.stream(side):
            if sleep is not None:
                sleep(100_000_000)
            table[index + 7]
    records = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    kept = any(record.get("data") == list(range(7, 47)) for record in records)
    expect(kept, "the trace has other values than the program")


def check_streams(place: Place) -> None:
    """Check that a step replay runs calls on the streams that they were recorded on, with the waits between them."""
    module, trace = place.module, place.folder / "two-streams.jsonl"
    x = torch.rand(200_000, device=place.device)
    side, main = module.Stream(), module.current_stream()
    module.synchronize()
    with Capture(trace) as capture:
        for _ in range(10):
            side.wait_stream(main)
            with module.stream(side):
                low = x.sort().values
                done = side.record_event()
            high = x.cumsum(0)
            main.wait_event(done)
            x = (low + high).sin()
    recorded = load(trace, partial=False)
    by_stream = recorded.calls["stream"].fillna(0).value_counts().to_dict()
    options = {"sequence": True, "device": place.device, "iterations": 3}
    step = replay(trace, **options).header["sequence"]
    one = place.folder / "one-stream.jsonl"
    one.write_text(re.sub(r',"streams":\[[^]]*\]', "", trace.read_text(encoding="utf-8")), encoding="utf-8")
    step_of_one = replay(one, **options).header["sequence"]
    facts = ("replayed", "unsupported", "not_replayed", "streams", "replayed_wall_ms", "failure")
    place.note(
        calls={str(stream): count for stream, count in by_stream.items()},
        waits=len(recorded.waits),
        **{f"{name}_{key}": found[key] for name, found in (("two", step), ("one", step_of_one)) for key in facts},
    )
    expect(capture.dropped == 0 and len(by_stream) == 2, f"the trace has calls by stream: {by_stream}, not on two")
    expect(len(recorded.waits) == 20, f"the trace has {len(recorded.waits)} of 20 waits")
    for found, streams in ((step, 2), (step_of_one, 1)):
        expect(found["replayed"] == found["calls"], f"not replayed: {found['not_replayed']} {found['failure']}")
        expect(found["streams"] == streams, f"the replay used {found['streams']} streams, not {streams}")


def check_step_in_graphs(place: Place) -> None:
    """Check that a step replay runs in graphs, with the calls that no graph can hold between them."""
    trace = place.folder / "step.jsonl"
    place.module.synchronize()
    with Capture(trace):
        # made in the capture, so that the replay's masks have as many true elements
        x = torch.linspace(0, 2, 1_000_000, device=place.device).view(1000, 1000)
        for _ in range(5):
            y = (x @ x).softmax(1).add_(x)
            rows = (y.sum(1) > y.sum(1).mean()).nonzero()[:, 0]
            y[rows].mean().item()
            x = x + y.cpu().to(place.device) * 0.01
    steps = {}
    for exec_mode in (None, "graph"):
        found = replay(trace, sequence=True, device=place.device, iterations=5, exec_mode=exec_mode)
        steps[exec_mode or "launched"] = found.header["sequence"]
    facts = ("replayed", "not_replayed", "graphs", "between_graphs", "replayed_ms", "replayed_wall_ms", "failure")
    place.note(**{f"{name}_{key}": step[key] for name, step in steps.items() for key in facts})
    step = steps["graph"]
    expect(step["replayed"] == step["calls"], f"not replayed: {step['not_replayed']} {step['failure']}")
    graphs, between = step["graphs"], step["between_graphs"]
    expect(15 <= between <= 25, f"{between} calls were between {graphs} graphs: the program has 20 that no graph holds")
    expect(10 <= graphs <= 20, f"the step was in {graphs} graphs")


def check_two_devices(place: Place) -> None:
    """Check a thread that switches between devices: it has times of both."""
    module, trace = place.module, place.folder / "two.jsonl"
    if module.device_count() < 2:
        raise NotHereError("there is one device")
    inputs = [torch.rand(2048, 2048, device=f"{place.kind}:{index}") for index in range(2)]
    with Capture(trace) as capture:
        for _ in range(5):
            for index, x in enumerate(inputs):
                torch.mm(x, x)
                with module.device(index):
                    torch.mm(x, x)
    times = load(trace, partial=False).calls.query("op == 'aten.mm.default'")["device_ns"] / 1e3
    expect(capture.dropped == 0 and len(times) == 20, f"{len(times)} of 20 calls are in the trace")
    expect(times.notna().all(), "calls on one of two devices have no time")
    first, second = times[0::4].median(), times[2::4].median()
    place.note(first_us=first, second_us=second)
    expect(0.2 < first / second < 5, f"the same product takes {first:.0f} us on one device, {second:.0f} on the other")


def _captured_script(place: Place, code: str) -> tuple[list[Path], str]:
    """Capture a script with the text `code` in the folder of `place`; return all traces and the output.

    The result includes traces of the script's forks.
    """
    script, traces = place.folder / "script.py", place.folder / "traces"
    script.write_text(dedent(code), encoding="utf-8")
    traces.mkdir()
    done = run_command("opcapture", "-o", traces / "t.jsonl", "--", script)
    expect(done.returncode == 0, f"opcapture: {last_line(done)}")
    return sorted(traces.glob("*.jsonl")), done.stdout + done.stderr


STEPS = (
    Step("a capture leaves it to the program which devices it sees", check_start),
    Step("forks of a captured program use the device", check_forks),
    Step("capture with workers of a DataLoader", check_workers),
    Step("device time of the first calls of a capture", check_first_calls),
    Step("capture of a program with a graph", partial(check_graph, device_time=AUTO)),
    Step("capture by events of a program with a graph", partial(check_graph, device_time=EVENTS)),
    Step("captured values of a side stream", check_side_stream),
    Step("capture and step replay of two streams", check_streams),
    Step("step replay in graphs", check_step_in_graphs),
    Step("capture on two devices", check_two_devices),
)
