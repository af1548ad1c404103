"""Generated traces of ranks, of any length, with known clocks and waits."""

from pathlib import Path

import numpy as np
import torch

from opgrip.traces.codec.call_blocks import CallBlock
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.arguments import GroupSpec, ReductionSpec, TensorSpec
from opgrip.traces.schema.records import End, Header, Scope, Signature, Thread

BLOCK = 1024
CALL_NS = 10_000
STARTED = 1_790_000_000_000_000_000
VECTOR = TensorSpec((256,), (1,), torch.float32, "cpu")


def make_rank(
    path: Path,
    rank: int,
    ranks: int,
    calls: int,
    *,
    slow: int | None = None,
    clock_ns: int = 0,
    every: int = 100,
    slowness: float = 1.5,
    jitter_ns: int = 0,
) -> Path:
    """Write the trace of a rank, in which every `every`-th call is an all-reduce and the others are additions of 10 us.

    The additions before an all-reduce last as long as on the slowest rank, where each takes `slowness` times as long,
    and the all-reduce 2 us more. All ranks continue at the same true time, except for the jitter.
    """
    noise = np.random.default_rng(rank)
    rounds = calls // every
    own_ns = round(CALL_NS * (slowness if rank == slow else 1.0))
    round_ns = round(CALL_NS * (slowness if slow is not None else 1.0)) * (every - 1) + 2_000 + 1_000
    within = np.append(np.arange(every - 1) * own_ns, (every - 1) * own_ns)
    begins = np.arange(rounds)[:, None] * round_ns + clock_ns
    # no rank continues before the collective has ended
    late = noise.integers(0, jitter_ns + 1, (rounds, 1)) if jitter_ns else 0
    starts = (begins + late + within[None, :]).reshape(-1)
    durations = np.tile(np.append(np.full(every - 1, own_ns - 1_000), 500), rounds)
    signature = np.tile(np.append(np.zeros(every - 1, dtype=np.int64), 1), rounds)
    group = GroupSpec("0", "gloo", tuple(range(ranks)), rank)
    header = Header({"rank": rank, "world_size": ranks, "started_unix_ns": STARTED, "steps": rounds})
    with TraceWriter(path, header, force=True) as writer:
        writer.write(Signature(0, "operator", "aten.add.Tensor", (VECTOR, VECTOR), {}, VECTOR))
        arguments = ([VECTOR], group, ReductionSpec("SUM"), None, False)
        writer.write(Signature(1, "operator", "c10d.allreduce_.default", arguments, {}, ([VECTOR], None)))
        writer.write(Scope(0, "", "", "forward", function="main", file="train.py", line=7))
        writer.write(Thread(0, "MainThread"))
        newest = -1
        for first in range(0, len(starts), BLOCK):
            part = slice(first, first + BLOCK)
            numbers = signature[part]
            tensors = np.where(numbers == 0, 3, 2)
            given = first + np.arange(len(numbers))
            # each addition takes two vectors and makes one, each collective works in place
            storages = np.zeros(tensors.sum(), dtype=np.int64)
            is_addition = numbers == 0
            storages[(np.cumsum(tensors) - 1)[is_addition]] = 1 + given[is_addition]
            block = CallBlock(
                0, numbers, np.zeros_like(numbers), starts[part], durations[part], tensors, storages, newest
            )
            writer.write(block)
            newest = max(newest, int(storages.max()))
        writer.write(End(len(starts), 2, int(starts[-1] - starts[0])))
    return path
