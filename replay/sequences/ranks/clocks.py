"""How the clocks of machines differ, so that times of several ranks can be held against each other."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns

import torch
from torch import distributed

from opgrip.replay.sequences.ranks.control import Control

ROUNDS = 20
"""Of asking another clock; the one that took shortest counts."""


def clock_offsets_ns(control: Control) -> list[int]:
    """By rank, what its clock is ahead of that of rank 0; 0 for ranks of one machine, which have one clock.

    Of another machine, half of what it took to ask is how far this may be wrong.
    """
    machines = control.share(machine())
    offsets = [0] * len(machines)
    first_of = {name: rank for rank, name in reversed(list(enumerate(machines)))}
    for name, rank in sorted(first_of.items(), key=lambda item: item[1]):
        if name != machines[0]:
            offset = ask_clock(control, rank)
            offsets = [offset if other == name else known for other, known in zip(machines, offsets, strict=True)]
    # rank 0 alone has asked
    return [int(offset) for offset in control.share(offsets)[0]]


def machine() -> str:
    """What the processes of one machine, since it was started, have in common."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def ask_clock(control: Control, rank: int) -> int:
    """In rank 0, what the clock of a rank is ahead of its own; 0 in the others. Both ranks have to call it."""
    if control.launch.rank not in (0, rank):
        return 0
    message = torch.zeros(1, dtype=torch.int64)
    answers: list[tuple[int, int]] = []
    try:
        for _ in range(ROUNDS):
            if control.is_first:
                asked = perf_counter_ns()
                distributed.send(message, rank)
                distributed.recv(message, rank)
                answered = perf_counter_ns()
                answers.append((answered - asked, int(message) - (asked + answered) // 2))
            else:
                distributed.recv(message, 0)
                message.fill_(perf_counter_ns())
                distributed.send(message, 0)
    except RuntimeError as error:
        control.lost(error)
    return min(answers)[1] if answers else 0
