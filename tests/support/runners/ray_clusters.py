"""Cluster of Ray on this machine with one process per node; as a program, it serves such a cluster.

It reads `NAME KIND` lines, starts a node for each, and prints the cluster's address and the node's process. It ends
with its input.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOOPBACK = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0"}


@contextmanager
def cluster(*nodes: tuple[str, str]) -> Iterator[tuple[str, list[int]]]:
    """Yield the address of a cluster with nodes of these names and kinds, and the process ids of the nodes."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | LOOPBACK,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    pids, address = [], ""
    try:
        for name, kind in nodes:
            process.stdin.write(f"{name} {kind}\n")
            process.stdin.flush()
            address, pid = json.loads(process.stdout.readline())
            pids.append(pid)
        yield address, pids
    finally:
        process.stdin.close()
        process.wait(120)


def serve() -> None:
    from ray.cluster_utils import Cluster

    output = os.dup(1)
    os.dup2(2, 1)
    memory = {"object_store_memory": 80 << 20, "include_dashboard": False}
    whole = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **memory})
    try:
        for line in sys.stdin:
            name, kind = line.split()
            os.environ["OPGRIP_MACHINE"] = name
            node = whole.add_node(num_cpus=1, resources={f"kind:{kind}": 1}, **memory)
            pid = node.all_processes["raylet"][0].process.pid
            os.write(output, json.dumps([whole.address, pid]).encode() + b"\n")
    finally:
        whole.shutdown()


def processes_below(pid: int) -> set[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    below = {pid}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {pid}


def workers_below(pid: int) -> list[int]:
    workers = []
    for child in processes_below(pid):
        with suppress(OSError):
            if (Path("/proc") / str(child) / "cmdline").read_bytes().startswith(b"ray::RayWorker"):
                workers.append(child)
    return workers


if __name__ == "__main__":
    serve()
