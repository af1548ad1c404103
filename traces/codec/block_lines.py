"""Blocks of calls in columns of numpy as they stand in the file."""

from __future__ import annotations

import json

import numpy as np
from numpy.typing import NDArray

from opgrip.traces.codec.call_blocks import CallBlock
from opgrip.traces.codec.storage_codes import encode_storages


def encode_block(block: CallBlock) -> bytes:
    """The line that `encode_line` makes of the same calls as a record."""
    starts = block.start_ns
    parts = [
        f'{{"type":"calls","thread":{block.thread},"start_ns":{int(starts[0]) if len(starts) else 0}',
        *(f'"{name}":{_text(column)}' for name, column in (("signature", block.signature), ("scope", block.scope))),
        f'"after_ns":{_text(np.diff(starts, prepend=starts[:1]))}',
        f'"duration_ns":{_text(block.duration_ns)}',
        f'"tensors":{_text(block.tensors)}',
        f'"newest":{block.newest}',
        f'"storages":{_plain(encode_storages(block.storages, block.newest))}',
    ]
    if len(block.device_ns):
        parts.append(f'"device_ns":{_text(block.device_ns)}')
    if block.page_faults:
        parts.append(f'"page_faults":{_plain([list(pair) for pair in block.page_faults])}')
    if block.streams.any():
        parts.append(f'"streams":{_text(block.streams)}')
    if block.perturbed:
        parts.append(f'"perturbed":{_plain([list(pair) for pair in block.perturbed])}')
    if block.slow_memory:
        parts.append(f'"slow_memory":{_plain([list(pair) for pair in block.slow_memory])}')
    return f"{','.join(parts)}}}\n".encode()


def _text(column: NDArray[np.int64]) -> str:
    return _plain(column.tolist())


def _plain(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
