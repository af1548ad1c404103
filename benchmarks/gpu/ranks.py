"""Check the collectives of a replay of several ranks, as far as one GPU allows."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import distributed

from gpu.step import NotHereError, Place, Step, expect
from opgrip.replay.sequences.ranks.rank_collectives import (
    GLOO,
    GroupMembers,
    backend_for,
    make_starter,
    read_collective,
)
from opgrip.traces.schema.arguments import GroupSpec, ReductionSpec, TensorSpec
from opgrip.traces.schema.records import OPERATOR, Signature


def check_collective(place: Place) -> None:
    """Check an all-reduce of one rank, on a group created and started as for several ranks."""
    if place.kind == "cuda" and not distributed.is_nccl_available():
        raise NotHereError("this torch has no NCCL")
    x = torch.rand(1 << 20, device=place.device)
    spec = TensorSpec(tuple(x.shape), x.stride(), x.dtype, place.device)
    # as FSDP calls it
    arguments = ([spec], GroupSpec("0", "", (0,), 0), ReductionSpec("AVG"), None, False)
    collective = read_collective(Signature(0, OPERATOR, "c10d.allreduce_.default", arguments, {}, None))
    backend = backend_for(place.device)
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    group = distributed.new_group([0], backend=backend)
    start = make_starter(collective, GroupMembers(group, 1, (0,), (0,), backend == GLOO))
    given, began = x.clone(), perf_counter()
    _, works = start([given])
    for work in works:
        work.wait()
    # the first call creates the connections
    place.note(backend=backend, first_ms=1e3 * (perf_counter() - began))
    expect(torch.equal(given, x), "an all-reduce of one rank changed its tensor")
    distributed.destroy_process_group()


STEPS = (Step("an all-reduce of one rank on NCCL", check_collective, needs_cuda="other devices have no NCCL"),)
