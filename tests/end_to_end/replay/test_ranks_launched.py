"""Steps of several ranks on gloo, captured, merged and replayed by processes that torchrun starts."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import pytest
from programs import ROOT, SUPPORT_PATH, run_command

from opgrip.replay.sequences.ranks.rank_collectives import is_exchange
from opgrip.traces import load
from opgrip.traces.schema.arguments import tensors
from opgrip.traces.schema.records import Signature

pytestmark = pytest.mark.slow

CAPTURE = """
import sys
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from opgrip.capture import Capture

distributed.init_process_group("gloo")
world_size = distributed.get_world_size()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def ddp():
    return DistributedDataParallel(net())


def fsdp():
    return fully_shard(net(), mesh=init_device_mesh("cpu", (world_size,)))


def tp():
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(net(), init_device_mesh("cpu", (world_size,)), plan)


def grid():
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(net(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


for name in sys.argv[1:]:
    model = globals()[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(f"{name}.jsonl"):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
distributed.destroy_process_group()
"""

REPLAY = """
import json, os, sys
from opgrip.replay import replay

if __name__ == "__main__":
    outcomes = {}
    for name, trace, options in json.loads(sys.argv[1]):
        results = replay(trace, sequence=True, iterations=2, **options)
        outcomes[name] = {"rows": [row.to_plain() for row in results], "ranks": results.header.get("ranks")}
    if os.environ["RANK"] == "0":
        with open("outcomes.json", "w") as file:
            json.dump(outcomes, file)
"""


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    return kept | {"OPGRIP_STORE": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": SUPPORT_PATH}


def torchrun(count: int, *words: object) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return [*launcher, *map(str, words)]


def launch(folder: Path, count: int, *words: object) -> subprocess.CompletedProcess[str]:
    command = torchrun(count, *words)
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )


def capture(folder: Path, count: int, *names: str) -> None:
    (folder / "capture.py").write_text(CAPTURE, encoding="utf-8")
    done = launch(folder, count, "capture.py", *names)
    assert done.returncode == 0, done.stderr
    for name in names:
        parts = [folder / f"{name}.rank{rank}.jsonl" for rank in range(count)]
        assert run_command("opgrip", "trace", "merge", *parts, "-o", folder / f"{name}.jsonl").returncode == 0


def replay_all(folder: Path, count: int, *replays: tuple[str, object, dict[str, Any]]) -> dict[str, Any]:
    (folder / "replay.py").write_text(REPLAY, encoding="utf-8")
    done = launch(folder, count, "replay.py", json.dumps(replays))
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, Any] = json.loads((folder / "outcomes.json").read_text(encoding="utf-8"))
    return outcomes


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    capture(folder, 2, "ddp", "fsdp", "tp")
    return folder


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    capture(folder, 4, "grid", "ddp", "fsdp", "tp")
    return folder


def exchanges_of(path: Path, process: int = 0) -> int:
    trace = load(path, partial=False)
    numbers = [signature.number for signature in trace.signatures if is_exchange(signature)]
    calls = trace.calls[trace.calls["process"] == process]
    return int(calls["signature"].isin(numbers).sum())


def test_steps_of_ddp_fsdp_and_tp_replay_with_all_their_collectives(two_ranks: Path) -> None:
    parts = [f"ddp.rank{rank}.jsonl" for rank in (1, 0)]
    outcomes = replay_all(
        two_ranks,
        2,
        *((name, f"{name}.jsonl", {}) for name in ("ddp", "fsdp", "tp")),
        ("alone", "ddp.jsonl", {"only": "collectives"}),
        ("parts", parts, {}),
    )
    for name in ("ddp", "fsdp", "tp"):
        ranks, rows = outcomes[name]["ranks"], outcomes[name]["rows"]
        count = exchanges_of(two_ranks / f"{name}.jsonl")
        assert count > 1
        assert [item["collectives"] for item in ranks["ranks"]] == [count, count]
        assert all(item["left_out"] == {} and item["unsupported"] == 0 for item in ranks["ranks"])
        assert all(item["substituted"] == 0 for item in ranks["ranks"])
        assert {row["status"] for row in rows} <= {"ok", "contended"}
        # a signature that both ranks called is counted for each rank by its own calls
        counts = [sum(row["count"] for row in rows if row["rank"] == rank) for rank in (0, 1)]
        assert counts == [item["calls"] for item in ranks["ranks"]]
        exchanged = [row for row in rows if row["group_ranks"] == "0,1"]
        assert sum(row["count"] for row in exchanged) == 2 * count
        assert all(row["exchange_us"] > 0 and row["wait_us"] >= 0 for row in exchanged)
    (reduced,) = (item for item in outcomes["ddp"]["ranks"]["collectives"] if item["kind"] == "all_reduce")
    # all gradients are in one bucket, once per step
    assert (reduced["bytes"], reduced["calls"], reduced["ranks"]) == (4 * (16 * 32 + 32 + 32 * 16 + 16), 2, [0, 1])
    assert reduced["bus_gb_per_s"] == pytest.approx(reduced["algorithm_gb_per_s"])
    assert reduced["algorithm_gb_per_s"] == pytest.approx(reduced["bytes"] / reduced["median_us"] / 1e3)
    kinds = {item["kind"] for item in outcomes["fsdp"]["ranks"]["collectives"]}
    assert {"all_gather", "reduce_scatter"} <= kinds
    alone = outcomes["alone"]["ranks"]["ranks"]
    assert [item["calls"] for item in alone] == [item["collectives"] for item in alone]
    assert [item["collectives"] for item in alone] == [exchanges_of(two_ranks / "ddp.jsonl")] * 2
    assert outcomes["parts"]["ranks"]["ranks"][1]["calls"] == outcomes["ddp"]["ranks"]["ranks"][1]["calls"]


def test_step_of_four_ranks_in_two_process_groups_replays_with_four_and_two(four_ranks: Path) -> None:
    done = launch(four_ranks, 4, "-m", "opgrip.replay", "grid.jsonl", "--sequence", "--iterations", 2, "-o", "out.json")
    assert done.returncode == 0, done.stderr
    assert "4 of 4 recorded ranks" in done.stdout
    # only one rank prints
    assert done.stdout.count("recorded ranks") == 1
    assert done.stderr.count("opreplay: replaying") == 1
    whole = json.loads((four_ranks / "out.json").read_text(encoding="utf-8"))["ranks"]
    groups = {tuple(item["ranks"]) for item in whole["collectives"]}
    assert groups == {(0, 1), (2, 3), (0, 2), (1, 3)}
    assert all(item["left_out"] == {} for item in whole["ranks"])
    outcomes = replay_all(
        four_ranks, 2, ("left out", "grid.jsonl", {}), ("scaled", "grid.jsonl", {"scale_ranks": True})
    )
    for name, outcome in outcomes.items():
        ran = {tuple(item["ranks"]) for item in outcome["ranks"]["collectives"]}
        assert ran == {(0, 1)}, name
        for rank, item in enumerate(outcome["ranks"]["ranks"]):
            left = sum(item["left_out"].values())
            assert left > 0
            assert item["collectives"] + left == exchanges_of(four_ranks / "grid.jsonl", rank)
    (reason,) = outcomes["left out"]["ranks"]["ranks"][0]["left_out"]
    assert "--scale-ranks" in reason


def test_scale_ranks_runs_a_group_with_the_ranks_that_exist(four_ranks: Path) -> None:
    names = ("ddp", "fsdp")
    outcomes = replay_all(
        four_ranks,
        2,
        *((f"{name} left out", f"{name}.jsonl", {}) for name in names),
        *((f"{name} scaled", f"{name}.jsonl", {"scale_ranks": True}) for name in names),
    )
    for name in names:
        trace = load(four_ranks / f"{name}.jsonl", partial=False)
        count = exchanges_of(four_ranks / f"{name}.jsonl")
        left, scaled = (outcomes[f"{name} {how}"]["ranks"] for how in ("left out", "scaled"))
        assert left["collectives"] == []
        for item in left["ranks"]:
            ((reason, times),) = item["left_out"].items()
            assert "--scale-ranks" in reason
            assert (item["collectives"], times) == (0, count)
        for item in scaled["ranks"]:
            assert (item["collectives"], item["left_out"], item["unsupported"]) == (count, {}, 0)
        assert {tuple(item["ranks"]) for item in scaled["collectives"]} == {(0, 1)}
        # a reduction keeps its size; collectives with one part per member have the parts of two out of four
        share_of = {"_allgather_base_": 0.5, "_reduce_scatter_base_": 0.5}
        expected = {
            int(largest_bytes(signature) * share_of.get(signature.op.split(".")[1], 1))
            for signature in filter(is_exchange, trace.signatures)
        }
        assert {item["bytes"] for item in scaled["collectives"]} == expected
        exchanged = [row for row in outcomes[f"{name} scaled"]["rows"] if row["group_ranks"] == "0,1"]
        assert sum(row["count"] for row in exchanged) == 2 * count
        assert {row["status"] for row in exchanged} <= {"ok", "contended"}


def largest_bytes(signature: Signature) -> int:
    return max(prod(spec.shape) * spec.dtype.itemsize for spec in tensors(signature.args))


def test_unknown_reduction_is_left_out_and_premul_sum_becomes_sum(two_ranks: Path) -> None:
    text = (two_ranks / "ddp.jsonl").read_text(encoding="utf-8")
    names = ("PREMUL_SUM", "NEWEST")
    for name in names:
        edited = text.replace('{"reduction":"SUM"}', f'{{"reduction":"{name}"}}')
        assert edited.count(name) == 2
        (two_ranks / f"{name}.jsonl").write_text(edited, encoding="utf-8")
    outcomes = replay_all(two_ranks, 2, *((name, f"{name}.jsonl", {}) for name in names))
    count = exchanges_of(two_ranks / "ddp.jsonl")
    for item in outcomes["PREMUL_SUM"]["ranks"]["ranks"]:
        assert (item["collectives"], item["left_out"]) == (count, {})
    for item in outcomes["NEWEST"]["ranks"]["ranks"]:
        # once per step; the group's other collectives still run
        ((reason, times),) = item["left_out"].items()
        assert reason.endswith("has no reduction NEWEST")
        assert (times, item["collectives"]) == (2, count - 2)
    assert {row["status"] for row in outcomes["PREMUL_SUM"]["rows"]} <= {"ok", "contended"}
    (row,) = (row for row in outcomes["NEWEST"]["rows"] if row["rank"] == 0 and row["op"] == "c10d.allreduce_.default")
    assert (row["status"], row["error"]) == ("unsupported", reason)


def test_collectives_return_what_torch_specifies(tmp_path: Path) -> None:
    done = launch(tmp_path, 2, ROOT / "tests/support/models/rank_collectives.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_usage_error_is_reported_by_one_rank_only(two_ranks: Path) -> None:
    done = launch(two_ranks, 3, "-m", "opgrip.replay", "ddp.jsonl", "--sequence")
    errors = [line for line in done.stderr.splitlines() if "error: " in line and line.startswith("opreplay")]
    assert errors == [
        "opreplay: error: 2 ranks are in the trace, and 3 were started: start at most 2: --nproc-per-node 2"
    ]
    assert done.returncode != 0


@pytest.mark.parametrize("kills", [True, False])
def test_dead_or_hanging_rank_ends_all_with_one_line(two_ranks: Path, kills: bool) -> None:
    words = ("-m", "opgrip.replay", "ddp.jsonl", "--sequence", "--iterations", 1_000_000, "--collective-timeout", 6)
    with subprocess.Popen(
        torchrun(2, *words), cwd=two_ranks, env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        guard = threading.Timer(120, process.kill)
        guard.start()
        try:
            lines: list[str] = []
            assert process.stderr is not None
            for line in process.stderr:
                lines.append(line)
                if "opreplay: replaying" in line:
                    victim = rank_of(process.pid, 1)
                    os.kill(victim, signal.SIGKILL if kills else signal.SIGSTOP)
                if line.startswith("opreplay: error: ") and not kills:
                    # torchrun allows it half a minute to exit
                    with suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGKILL)
            assert process.wait() != 0
        finally:
            guard.cancel()
    assert [line for line in lines if line.startswith("opreplay: error: ")] == [
        "opreplay: error: rank 1 has ended, or does not respond: all ranks end; see its last output\n"
    ]


def rank_of(launcher: int, rank: int) -> int:
    for task in Path(f"/proc/{launcher}/task").iterdir():
        for child in (task / "children").read_text(encoding="ascii").split():
            with suppress(OSError):
                variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in variables:
                    return int(child)
    raise AssertionError(f"there is no rank {rank}")
