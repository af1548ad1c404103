"""The last calls of a program, as the modes kept them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from opgrip.capture.recording.blocks import CallBlock


class Ring:
    """The calls that ended last, of all threads together.

    Parameters
    ----------
    last : how many are kept
    """

    def __init__(self, last: int) -> None:
        self.last = last
        self._blocks: list[CallBlock] = []

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def add(self, blocks: list[CallBlock]) -> list[CallBlock]:
        """Keep calls in the order in which each thread made them; gives those that no longer have room."""
        self._blocks += blocks
        surplus = len(self) - self.last
        if surplus <= 0:
            return []
        ends = np.concatenate([block.calls[:, 2] for block in self._blocks])
        oldest_ns = int(np.partition(ends, surplus)[surplus])
        forgotten, kept = [], []
        for block in self._blocks:
            # a thread's calls stand in the order of their ends
            first = int(np.searchsorted(block.calls[:, 2], oldest_ns))
            if first:
                forgotten.append(block.part(0, first))
            if first < len(block):
                kept.append(block.part(first, len(block)).copied() if first else block)
        self._blocks = kept
        return forgotten

    def take(self) -> list[CallBlock]:
        """All calls, removed."""
        blocks, self._blocks = self._blocks, []
        return blocks

    def pairs(self) -> set[int]:
        """The numbers of the calls' pairs."""
        return {number for block in self._blocks for number in np.unique(block.calls[:, 0]).tolist()}

    def modes(self) -> Iterator[int]:
        """The numbers of the modes that recorded the calls."""
        return (block.mode.number for block in self._blocks)
