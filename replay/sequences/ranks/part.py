"""The part of a trace that one rank ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from opgrip.errors import UserError
from opgrip.replay.cases.flow import Flow
from opgrip.replay.sequences.ranks.collectives import LOCAL, MOST_MEMBERS, is_exchange
from opgrip.traces import Trace
from opgrip.traces.codec.call_blocks import CallBlock
from opgrip.traces.io.reader import read_header
from opgrip.traces.schema.records import NO_STORAGE
from opgrip.traces.table.call_source import CallSource
from opgrip.traces.table.call_table import all_storages, calls_table

HINT = "merge those of all ranks: opgrip trace merge step.rank*.jsonl -o step.jsonl"


def recorded_ranks(trace: Trace) -> dict[int, int | None]:
    """By rank, the number of its process in a merged trace; None where the trace is of one rank alone.

    Raises
    ------
    UserError : where the trace is of no ranks
    """
    headers = trace.header.get("processes")
    ranks: dict[int, int | None] = {}
    for process, header in enumerate(headers if isinstance(headers, list) else []):
        rank = header.get("rank") if isinstance(header, dict) else None
        if type(rank) is int:
            # a process that a rank forked is in the trace after it
            ranks.setdefault(rank, process)
    world_size = trace.header.get("world_size")
    if not ranks and type(trace.header.get("rank")) is int and type(world_size) is int:
        ranks = dict.fromkeys(range(min(world_size, MOST_MEMBERS)))
    if not ranks:
        raise UserError("the trace is of one process, not of several ranks", HINT)
    return ranks


def own_file(paths: Sequence[Path], rank: int, unbounded: bool = False) -> Path:
    """Of the traces of all ranks, that of one.

    Raises
    ------
    UserError : where none of them is, or a file cannot be read
    """
    for path in paths:
        if read_header(path, unbounded).fields.get("rank") == rank:
            return path
    raise UserError(f"none of the {len(paths)} traces is of rank {rank}", "name those of all ranks")


def part_of(trace: Trace, rank: int, world_size: int) -> Trace:
    """The calls of one rank, without a table of those of the others.

    Raises
    ------
    UserError : where there are more processes here than ranks in the trace, or some of these are not in it
    """
    ranks = recorded_ranks(trace)
    if world_size > len(ranks):
        few = f"{len(ranks)} ranks are in the trace, and {world_size} were started"
        raise UserError(few, f"start at most {len(ranks)}: --nproc-per-node {len(ranks)}")
    absent = sorted(set(range(world_size)) - set(ranks))
    if absent or trace.header.get("rank", rank) != rank:
        raise UserError(f"rank {absent[0] if absent else rank} is not in the trace", HINT)
    if ranks[rank] is None:
        return trace
    source = _source_of(trace, ranks[rank])
    calls = calls_table(source, trace.names)
    present = set(calls["signature"].tolist())
    return replace(
        trace,
        calls=calls,
        # whatever is not given here is made of all ranks
        storages=all_storages(source),
        unfinished=[],
        source=source,
        signatures=[signature for signature in trace.signatures if signature.number in present],
        header={**trace.header, "rank": rank},
    )


def _source_of(trace: Trace, process: int | None) -> CallSource:
    """The blocks of calls that one process made."""
    threads = {number for number, thread in trace.threads.items() if thread.process == process}

    def own_blocks() -> Iterator[CallBlock]:
        return (block for block in trace.source if block.thread in threads)

    source = CallSource(own_blocks)
    for block in own_blocks():
        source.add(block)
    return source


def exchanges_alone(trace: Trace) -> Trace:
    """The collectives of a rank's part, and what hands on their results."""
    numbers = {item.number for item in trace.signatures if is_exchange(item) or item.op in LOCAL}
    calls = trace.calls[trace.calls["signature"].isin(numbers)]
    signatures = [item for item in trace.signatures if item.number in numbers]
    return replace(trace, calls=calls.reset_index(drop=True), signatures=signatures)


def wait_points(flow: Flow, places: Sequence[int], kept: Sequence[int] | None = None) -> dict[int, list[int]]:
    """By the place of a call, the collectives that have to be done before it, by theirs.

    A trace does not tell where a program waited for a collective that it did not wait for at once: it had to before a
    call that takes the memory.

    Parameters
    ----------
    places : of the collectives
    kept : of the calls that are run, which are numbered anew; a wait before another one comes before the next of them
    """
    place_of_kept = {place: number for number, place in enumerate(range(len(flow.calls)) if kept is None else kept)}
    collectives, due = set(places), list[int]()
    pending: dict[int, set[int]] = {}
    before: dict[int, list[int]] = {}
    for place, call in enumerate(flow.calls):
        touched = {number for number in (*call.takes, *call.gives) if number != NO_STORAGE}
        awaited = set[int]().union(*(pending.get(number, ()) for number in touched))
        if awaited:
            due += sorted(awaited)
            pending = {number: rest for number, others in pending.items() if (rest := others - awaited)}
        if place in collectives:
            for number in touched:
                pending.setdefault(number, set()).add(place)
        if due and place in place_of_kept:
            before[place_of_kept[place]] = [place_of_kept[other] for other in due]
            due = []
    return before
