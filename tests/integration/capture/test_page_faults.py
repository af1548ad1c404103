"""Tests of page faults of calls, with real memory and real faults."""

from __future__ import annotations

from pathlib import Path

import torch
from programs import succeed

from opgrip.capture import Capture
from opgrip.traces import load

PAGES = 4 * (1 << 20) // 4096  # pages of a result of four megabytes


KEPT_AND_GIVEN_BACK = """
import ctypes
import torch

allocator = ctypes.CDLL("libc.so.6")
large = torch.ones(1 << 20)
# M_MMAP_THRESHOLD and M_TRIM_THRESHOLD: glibc keeps what is freed
allocator.mallopt(-3, 32 << 20)
allocator.mallopt(-1, 1 << 30)
torch.ones(1 << 22)
for _ in range(40):
    torch.ops.aten.cos(large)
for _ in range(40):
    allocator.malloc_trim(0)
    torch.ops.aten.sin(large)
"""


def test_page_faults_distinguish_new_from_reused_memory(tmp_path: Path) -> None:
    # a separate program, because results get huge pages in a process in which NumPy has had large arrays
    (tmp_path / "program.py").write_text(KEPT_AND_GIVEN_BACK)
    succeed("opcapture", "-o", "t.jsonl", "--", "program.py", cwd=tmp_path)
    calls = load(tmp_path / "t.jsonl").calls
    faults = {op: calls[calls["op"] == f"aten.{op}.default"]["page_faults"] for op in ("cos", "sin")}
    assert (faults["sin"] > 0.9 * PAGES).mean() > 0.9
    # the block moves a little with each call, so a few calls get new pages anyway
    assert (faults["cos"] < 0.1 * PAGES).any()


def test_small_calls_and_views_have_no_page_faults(tmp_path: Path) -> None:
    large, small = torch.ones(1 << 20), torch.ones(8)
    with Capture(tmp_path / "t.jsonl") as watched:
        for _ in range(20):
            small.sin()
            large.view(1 << 10, 1 << 10)
    calls = load(tmp_path / "t.jsonl").calls
    assert (watched.calls, watched.dropped) == (40, 0)
    assert (calls["page_faults"] == 0).all()
