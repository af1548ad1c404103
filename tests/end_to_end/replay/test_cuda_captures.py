"""Captures and replays of a real GPU, an H100, which other machines read, replay and compare."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from programs import ROOT, run_command, succeed

KEPT = ROOT / "benchmarks/results/h100/raw.zip"
# operators whose calls take a CPU microseconds, and one that has no kernel for it
SMALL = ("aten.add*", "aten.cat*", "aten.embedding*", "*cudnn_attention*")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return a folder with the files of the GPU."""
    with zipfile.ZipFile(KEPT) as archive:
        for name in ("clocks-kernels.jsonl", "bert.jsonl", "replay-llama.json", "graph-llama.json"):
            archive.extract(name, tmp_path)
    return tmp_path


def test_gpu_trace_info_shows_device_and_driver(kept: Path) -> None:
    shown = run_command("opgrip", "trace", "info", kept / "bert.jsonl").stdout
    assert "cuda:0: NVIDIA H100 80GB HBM3" in shown
    assert "driver 580.159.04" in shown
    assert "calls       10,224" in shown
    assert "times are device times for calls that ran on a device" in shown


@pytest.mark.slow
def test_gpu_calls_are_replayed_on_a_cpu(kept: Path) -> None:
    rows = kept / "rows.json"
    patterns = [word for pattern in SMALL for word in ("--op", pattern)]
    words = ("--device", "cpu", *patterns, "--top", 5, "--budget", 0.02, "-o", rows)
    succeed("opreplay", kept / "clocks-kernels.jsonl", *words)
    results = json.loads(rows.read_text())["results"]
    statuses = sorted((row["op"], row["status"].replace("contended", "ok")) for row in results)
    assert statuses == [
        ("aten._scaled_dot_product_cudnn_attention.default", "unsupported"),
        ("aten.add.Tensor", "ok"),
        ("aten.add.Tensor", "ok"),
        ("aten.cat.default", "ok"),
        ("aten.embedding.default", "ok"),
    ]
    assert {row["device"] for row in results} == {"cpu"}
    # by the device's own records: far below the time of a launch
    assert min(row["captured_us"] for row in results if row["op"] == "aten.add.Tensor") < 2


def test_gpu_replays_are_compared(kept: Path) -> None:
    done = succeed("opgrip", "compare", kept / "replay-llama.json", kept / "graph-llama.json")
    assert "60 cases timed in both: " in done.stdout
    assert ", 124 missing" in done.stdout
