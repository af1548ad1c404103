"""Which calls made what other calls read."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from opgrip.traces.analysis.trimming.outline import Flags, Outline
from opgrip.traces.schema.records import FUNCTION, NO_STORAGE
from opgrip.traces.table.profiler_labels import is_mark


class Flow:
    """The calls that made or last wrote what each call reads, as `opgrip trace graph` follows them.

    Calls inside of an extension function, and gripped functions around their calls, are left out: they read and write
    what those read and write.
    """

    def __init__(self, outline: Outline) -> None:
        self._order = _own_calls(outline)
        readers, producers = array("q"), array("q")
        writer: dict[int, int] = {}
        first = outline.first_storage
        signatures, counts, storages = outline.signature.tolist(), outline.tensors.tolist(), outline.storages.tolist()
        for index in self._order:
            begin = int(first[index])
            mentioned = storages[begin : begin + counts[index]]
            signature = outline.signatures.get(signatures[index])
            flags = signature.written if signature is not None else ()
            takes = mentioned[: len(flags)]
            before = {writer[storage] for storage in takes if storage in writer} - {index}
            producers.extend(sorted(before))
            readers.extend([index] * len(before))
            taken = {*takes}
            for place, storage in enumerate(mentioned):
                # a result in the memory of an argument is a view of it, and makes nothing
                makes = flags[place] if place < len(flags) else storage not in taken and storage not in writer
                if makes and storage != NO_STORAGE:
                    writer[storage] = index
        self._readers = np.frombuffer(readers, dtype=np.int64) if readers else np.empty(0, dtype=np.int64)
        self._producers = np.frombuffer(producers, dtype=np.int64) if producers else np.empty(0, dtype=np.int64)

    def with_producers(self, flags: Flags) -> Flags:
        """The same calls, and those that made what they read, and what these read, and so on."""
        flags = flags.copy()
        # edges are in the order in which readers began, and what is read was made before
        for reader, producer in zip(self._readers[::-1].tolist(), self._producers[::-1].tolist(), strict=True):
            if flags[reader]:
                flags[producer] = True
        return flags

    def cut_edges(self, flags: Flags) -> int:
        """How many times a call reads what one made that is left out."""
        return int(np.count_nonzero(flags[self._readers] & ~flags[self._producers]))


def _own_calls(outline: Outline) -> list[int]:
    """The calls that stand for themselves, in the order in which they began."""
    passed = [n for n, item in outline.signatures.items() if item.kind == FUNCTION or is_mark(item.op)]
    inside = [n for n, scope in outline.scopes.items() if scope.inside is not None and not scope.gripped]
    own: NDArray[np.bool_] = ~np.isin(outline.signature, passed) & ~np.isin(outline.scope, inside)
    order = np.argsort(outline.start_ns, kind="stable")
    indices: list[int] = order[own[order]].tolist()
    return indices
