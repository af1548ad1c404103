"""Tests of production engines that are recorded under load and continue as before."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest
from optional import needs
from programs import succeed, wait_for
from services import ask, on_demand, running

from opgrip.traces import Trace, load

pytestmark = pytest.mark.slow

# largest ratio of the median latency after a recording to the one before: a mode that stayed on would exceed it
WORST = 5.0
SERVICE = """
import asyncio, json, sys, threading, time, torch, uvicorn, httpx
from fastapi import FastAPI
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
net = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=64)).eval()
app = FastAPI()

@app.get("/tokens")
def tokens(length: int):  # not async: runs in a pool of threads
    with torch.inference_mode():
        return net(torch.arange(length)[None] % 64).logits.argmax(-1).tolist()

@app.get("/text")
def text(length: int):
    out = net.generate(torch.arange(length)[None] % 64, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return out.tolist()

server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
threading.Thread(target=server.run, daemon=True).start()
while not server.started:
    time.sleep(0.01)
port = server.servers[0].sockets[0].getsockname()[1]
expected = {}
log = open("requests.txt", "w", buffering=1)

def load():
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        number = 0
        while True:
            number += 1
            route, length = ("/text", "/tokens")[number % 4 > 0], 3 + number % 5
            start = time.perf_counter()
            reply = client.get(route, params={"length": length})
            took = time.perf_counter() - start
            same = reply.status_code == 200 and expected.setdefault((route, length), reply.json()) == reply.json()
            log.write(json.dumps([time.time(), took, same]) + "\\n")

for _ in range(4):
    threading.Thread(target=load, daemon=True).start()
print("ready", flush=True)
while True:
    time.sleep(1)
"""
RANKS = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
if dist.get_rank() == 0:
    print("ready", flush=True)
number = 0
while True:
    number += 1
    optimizer.zero_grad()
    net(torch.full((3, 4), float(number))).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""


def steps_of(trace: Trace) -> int:
    return sum(str(label).startswith("opgrip step") for label in trace.labels.index)


def replays(path: Path) -> None:
    """Check that a trace replays elsewhere: its matrix products, each as eager PyTorch runs it."""
    succeed("opreplay", path, "--op", "*mm*", "--top", "2", "--budget", "0.1", "--strict", cwd=path.parent)


@needs("fastapi", "uvicorn", "httpx", "transformers")
def test_service_under_load_gives_unchanged_answers(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(SERVICE, encoding="utf-8")
    requests = tmp_path / "requests.txt"
    with running(tmp_path, *on_demand("--", "service.py")) as process:
        wait_for(lambda: requests.read_text().count("\n") > 60, process)
        done = ask(tmp_path, "trigger", "service", "--steps", "12", "-o", "service.jsonl")
        assert done.returncode == 0, done.stderr
        count = requests.read_text().count("\n")
        wait_for(lambda: requests.read_text().count("\n") > count + 60, process)
    rows = [json.loads(line) for line in requests.read_text().splitlines() if line.endswith("]")]
    assert all(same for _, _, same in rows)
    latencies = [took for _, took, _ in rows]
    assert statistics.median(latencies[-50:]) < WORST * statistics.median(latencies[10:60])
    trace = load(tmp_path / "service.jsonl", partial=False)
    assert steps_of(trace) == 12
    # each step is a whole pass, which ends in the projection to the vocabulary
    heads = trace.calls[trace.calls["module"] == "lm_head"]
    # in inference mode linear is a single call; without gradients it is made of several
    assert heads["op"].astype(str).isin(["aten.mm.default", "aten.linear.default"]).sum() == 12
    assert set(trace.calls["thread"]) == {"AnyIO worker thread"}
    replays(tmp_path / "service.jsonl")


def test_one_rank_of_a_job_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS, encoding="utf-8")
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", *on_demand())
    with running(tmp_path, *command, "-o", "rank%r.jsonl", "--", "train.py") as process:
        wait_for(lambda: len(list((tmp_path / "opgrip").glob("*.sock"))) == 2, process)
        assert "choose one by its PID or --rank: " in ask(tmp_path, "trigger", "train").stderr
        done = ask(tmp_path, "trigger", "train", "--rank", "1", "--steps", "2")
        assert done.stdout.split() == [str(tmp_path / "rank1.jsonl")], done.stderr
        process.terminate()
        process.wait(60)
    assert steps_of(load(tmp_path / "rank1.jsonl", partial=False)) == 2
