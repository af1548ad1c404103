"""Workers of a Ray cluster: their rows equal a plain replay's, even if workers or nodes are lost."""

import json
import os
import signal
import socket
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from example_trace import small_trace
from optional import needs
from outside import with_package
from programs import program_path, refusal, succeed, wait_for
from ray_clusters import LOOPBACK, cluster, workers_below

from opgrip.errors import UserError
from opgrip.replay.reports.outcome import Results
from opgrip.replay.workers.executors import EngineOptions
from opgrip.replay.workers.executors.ray import start_ray
from opgrip.replay.workers.ray_pool import Processors

RAY = ["--engine", "ray", "--processors", "0"]
FAST = ["--iterations", "3", "--warmup", "0", "--cache", "warm"]
LONG = ["--iterations", "2000", "--warmup", "0", "--cache", "warm", "--threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    small_trace(folder / "net.predict.jsonl")
    small_trace(folder / "other.predict.jsonl", (7,), extension="nothing._ext:function")
    (folder / "long").mkdir()
    small_trace(folder / "long" / "long.jsonl", tuple(range(200_000, 224_000, 1_000)))
    return folder


def comparable(rows: Results) -> list[tuple[object, ...]]:
    return [
        (row.trace, row.case, row.op, row.mode, row.note, row.status, row.error, row.share, row.samples) for row in rows
    ]


@pytest.mark.slow
@needs("ray")
def test_ray_rows_equal_a_plain_replay_and_compile_before_measuring(folder: Path, tmp_path: Path) -> None:
    site = with_package(tmp_path / "site", {"opgrip.modes": "planted_modes"})
    command = [folder, *FAST, "--mode", "planted-keeps", "-o"]
    for output, words in (("plain.json", []), ("ray.json", [*RAY, "--workers", "2"])):
        environment = site | {"OPGRIP_CACHE": str(tmp_path / f"{output}.cache"), "OPGRIP_STORE": ""}
        done = succeed("opreplay", *command, output, *words, cwd=tmp_path, env=environment)
    plain, rows = Results.load(tmp_path / "plain.json"), Results.load(tmp_path / "ray.json")
    assert comparable(rows) == comparable(plain)
    assert {row.note for row in rows if row.mode != "eager" and row.status == "ok"} == {"made"}
    assert "compiling 2 cases on " in done.stderr
    assert rows.header["trace_hash"] == plain.header["trace_hash"]
    assert {row.added["machine"] for row in rows} == {*rows.header["machines"]}


def start(folder: Path, output: Path, *words: str) -> subprocess.Popen[str]:
    command = [program_path("opreplay"), folder / "long" / "long.jsonl", *LONG, *RAY, "-o", output, *words]
    environment = os.environ | LOOPBACK | {"OPGRIP_STORE": ""}
    return subprocess.Popen(list(map(str, command)), env=environment, stderr=subprocess.PIPE, text=True)


def rows_in_journal(output: Path) -> int:
    path = output.with_name(f"{output.name}.journal")
    return max(0, len(path.read_text().splitlines()) - 1) if path.exists() else 0


def check_whole(output: Path, replay: subprocess.Popen[str]) -> Results:
    _, errors = replay.communicate(timeout=400)
    assert replay.returncode == 0, errors
    rows = Results.load(output)
    assert Counter(row.case for row in rows) == Counter(range(24)), errors
    assert {row.status for row in rows} == {"ok"}
    return rows


@pytest.mark.slow
@needs("ray")
def test_killed_worker_costs_a_retry_and_no_row(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    replay = start(folder, output, "--workers", "2")
    wait_for(lambda: rows_in_journal(output) > 2, replay)
    workers = workers_below(replay.pid)
    os.kill(workers[0], signal.SIGKILL)
    check_whole(output, replay)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
@needs("ray")
def test_killed_ray_replay_resumes_with_the_received_rows(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    replay = start(folder, output, "--workers", "2")
    wait_for(lambda: rows_in_journal(output) > 2, replay)
    replay.kill()
    replay.wait(60)
    _, *lines = output.with_name("r.json.journal").read_text().splitlines()[:4]
    kept = {row["case"]: row["times_us"] for line in lines for row in json.loads(line)}
    rows = check_whole(output, start(folder, output, "--workers", "2", "--resume"))
    assert {row.case: list(row.times_us) for row in rows if row.case in kept} == kept


@pytest.mark.slow
@needs("ray")
def test_killed_node_costs_a_retry_and_machine_kinds_do_not_mix(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    with cluster(("one", "big"), ("two", "big"), ("three", "small")) as (address, pids):
        environment = os.environ | LOOPBACK
        command = [folder / "long" / "long.jsonl", *FAST, *RAY, "--address", address]
        error = refusal("opreplay", *command, cwd=tmp_path, env=environment, fresh=True)
        assert "the cluster has machines of 2 kinds (big; small): select one with --machine-kind" in error
        # one worker, which is replaced on the other node; it survives its own node for some seconds
        words = ["--address", address, "--machine-kind", "big", "--workers", "1", "--iterations", "8000"]
        replay = start(folder, output, *words)
        wait_for(lambda: rows_in_journal(output) > 2, replay)
        first = json.loads(output.with_name("r.json.journal").read_text().splitlines()[1])[0]["machine"]
        os.kill(pids[("one", "two").index(first)], signal.SIGKILL)
        rows = check_whole(output, replay)
        assert {row.added["machine_kind"] for row in rows} == {"big"}
        assert {row.added["machine"] for row in rows} == {"one", "two"}


def test_processors_belong_to_one_worker_until_it_ends() -> None:
    usable = os.sched_getaffinity(0)
    try:
        one = Processors(1)
        assert os.sched_getaffinity(0) == {*one.numbers}
        os.sched_setaffinity(0, usable)
        with pytest.raises(UserError, match="processors are free, because other workers use the rest"):
            Processors(len(usable), wait_s=0)
        one.close()
        Processors(len(usable), wait_s=0).close()
        with pytest.raises(UserError, match=r"this machine has .* processors, not"):
            Processors(len(usable) + 1)
    finally:
        os.sched_setaffinity(0, usable)


@needs("ray")
def test_unreachable_cluster_is_reported_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(UserError, match=rf"no Ray cluster can be reached at 127\.0\.0\.1:{port}: connection refused"):
        start_ray(EngineOptions(engine="ray", address=f"127.0.0.1:{port}")).__enter__()
