"""Check replays on a device by its names, of all of its calls, on several streams."""

from __future__ import annotations

import json

import torch

from gpu.kernels import kernel_us
from gpu.programs import capture_calls, capture_layers, expect_ok, last_line, median_us, replay_rows, run_command
from gpu.step import NotHereError, Place, Step, expect


def check_without_index(place: Place) -> None:
    """Check `--device cuda`, as the documentation writes it."""
    rows = replay_rows(place, capture_layers(place), device=place.kind)
    expect_ok(rows)
    place.note(device=rows[0].device)


def check_without_device(place: Place) -> None:
    """Check that a trace captured on the device runs there by default."""
    rows = replay_rows(place, capture_layers(place), device=None)
    expect_ok(rows)
    expect({row.device.partition(":")[0] for row in rows} == {place.kind}, f"it ran on {rows[0].device}")
    place.note(device=rows[0].device)


def check_from_cpu(place: Place) -> None:
    """Check that a trace captured on the CPU runs on the device on request, with the command."""
    x, output = torch.rand(64, 64), place.folder / "rows.json"
    trace = capture_calls(place, lambda: torch.mm(x, x), lambda: torch.relu(x))
    done = run_command("opreplay", trace, "--device", place.device, "--budget", "0.05", "--strict", "-o", output)
    expect(done.returncode == 0, last_line(done))
    rows = json.loads(output.read_text(encoding="utf-8"))["results"]
    expect({row["device"].partition(":")[0] for row in rows} == {place.kind}, f"it ran on {rows[0]['device']}")
    place.note(rows=len(rows))


def check_cpu_attention(place: Place) -> None:
    """Check that attention of the CPU, of a length that is not a multiple of 8, runs as kernels of the device."""
    draws = [torch.randn(2, 12, 197, 64, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    tensors = [draw.requires_grad_() for draw in draws]
    attend = torch.nn.functional.scaled_dot_product_attention
    trace = capture_calls(place, *(lambda x=x: attend(x, x, x).sum().backward() for x in tensors))  # type: ignore[misc]
    rows = [row for row in replay_rows(place, trace) if "attention" in row.op]
    place.note(attention={f"{row.op} {row.shapes}": [row.status, row.note, row.median_us] for row in rows})
    expect(len(rows) == 2 * len(tensors), f"the trace has {len(rows)} kinds of calls of attention")
    expect_ok(rows)


def check_second_device(place: Place) -> None:
    """Check that events, graphs and streams belong to the device that the calls run on."""
    if place.module.device_count() < 2:
        raise NotHereError("there is one device")
    second = f"{place.kind}:1"
    x = torch.rand(1 << 14, device=second)
    trace = capture_calls(place, lambda: x.sin())
    expected = kernel_us(lambda: x.sin()) if place.kind == "cuda" else 0.0
    place.note(kernel_us=expected)
    for method in ("events", "graph"):
        [row] = replay_rows(place, trace, device=second, exec_mode=method)
        us = median_us(row)
        place.note(**{method: us})
        expect(us > 0.5 * expected, f"{method} gives {us:.2f} us of a kernel of {expected:.2f}")


def check_sequence(place: Place) -> None:
    """Check that `opreplay --sequence` supports all calls of a step on the device."""
    output = place.folder / "sequence.json"
    done = run_command("opreplay", capture_layers(place), "--sequence", "--device", place.device, "-o", output)
    expect(done.returncode == 0, last_line(done))
    result = json.loads(output.read_text(encoding="utf-8"))["sequence"]
    place.note(**{name: value for name, value in result.items() if isinstance(value, int | float)})
    expect(not result["unsupported"], f"calls are unsupported: {result['unsupported']}")


def check_streams(place: Place) -> None:
    """Check that two concurrent cases overlap, or take as long as in sequence: never much less than the longer one."""
    rows = replay_rows(place, capture_layers(place), streams=[1, 2])
    expect_ok(rows)
    pairs = [row for row in rows if row.streams == 2]
    expect(pairs, "rows of two streams are missing")
    overlaps = [row.overlap for row in pairs if row.overlap is not None]
    place.note(overlaps=overlaps)
    expect(all(0.1 < overlap < 3 for overlap in overlaps), f"overlaps are {overlaps}")


STEPS = (
    Step("replay on a device without an index", check_without_index),
    Step("replay without --device", check_without_device),
    Step("replay of a trace of the CPU", check_from_cpu),
    Step("attention captured on the CPU", check_cpu_attention),
    Step("replay on the second device", check_second_device),
    Step("--sequence", check_sequence),
    Step("--streams 2", check_streams),
)
