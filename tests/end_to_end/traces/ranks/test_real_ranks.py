"""Ranks of a real program under torchrun: captured, merged, and analysed for waits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from programs import run_command, succeed

from opgrip.traces import load

pytestmark = pytest.mark.slow
PROGRAM = """\
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
total = torch.ones(4)
for step in range(4):
    model(torch.ones(2, 8)).sum().backward()
    if rank == 1:
        # however busy the machine is, the other one is there first
        store.wait([f"rank 0 is at step {step}"])
        time.sleep(0.2)
    else:
        store.set(f"rank 0 is at step {step}", "")
    dist.all_reduce(total)
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    total + 1
dist.destroy_process_group()
"""


def test_ranks_wait_for_the_one_that_sleeps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    options = ("--nproc-per-node", "2", "--master-port", "29619", "--no-python")
    capture = (Path(sys.executable).parent / "opcapture", "-o", "t.jsonl", "--", "train.py")
    succeed("torchrun", *options, *capture, cwd=tmp_path)
    succeed("opgrip", "trace", "merge", "t.rank0.jsonl", "t.rank1.jsonl", "-o", "t.jsonl", cwd=tmp_path)
    clocks = load(tmp_path / "t.jsonl", partial=False).header["clocks"]["processes"]
    assert clocks[1]["collectives"] > 4
    done = run_command("opgrip", "trace", "ranks", "t.jsonl", "--json", cwd=tmp_path)
    tables = json.loads(done.stdout)
    assert tables["unmatched"] == 0
    (place,) = (row for row in tables["places"] if row["line"] == 18)
    assert (place["kind"], place["collectives"], place["slowest"], place["last"]) == ("all_reduce", 4, 1, 4)
    # the wait of the other rank due to four sleeps of 200 ms, less its own delay
    assert place["waiting_ms"] > 400
    # calls take the results of DDP's buckets and of collectives that are waited for later
    assert {row["unknown"] for row in tables["ranks"]} == {0}
