"""Operator inputs that BackendBench runs: Parquet files with one row per operator and arguments, and a count.

Arguments are text in TritonBench's notation. The text is parsed and never evaluated.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any

import torch

from opgrip.cli.plugins import needed
from opgrip.traces.formats.building import NO_GRADIENTS, NO_TIMES, NO_VALUES, RecordBuilder
from opgrip.traces.formats.operator_schemas import registered
from opgrip.traces.formats.parquet_files import EXTRA, MAGIC, MARK, footer_of, open_parquet
from opgrip.traces.formats.tritonbench import (
    DTYPE_OF,
    MOST_CALLS,
    NO_DEVICE,
    OPERATOR_LINE,
    call_text,
    device_named,
    parse_call,
)
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, Losses, formats
from opgrip.traces.schema.arguments import map_leaves
from opgrip.traces.schema.records import Record, Signature
from opgrip.traces.table.trace import Trace

MOST_TEXT = 16 << 20
"""Bytes of arguments in memory at a time."""
ROWS = 256
"""Rows in memory at a time."""
GROUP = 4096
"""Rows written at a time."""
DEVICE = re.compile(r"torch\.device\(['\"]?([\w:]+)['\"]?\)|(cuda(?::\d+)?|cpu|meta)")
SYNTHETIC = "rows that no model called (count 0): they are called once"


def recognizes(head: Head) -> bool:
    if not head.start.startswith(MAGIC):
        return False
    footer = footer_of(head.path)
    return MARK not in footer and b"op_name" in footer and b"args" in footer


def read(file: ForeignFile) -> Iterator[Record]:
    """Yield the calls of each row, repeated by its count."""
    with open_parquet(file, {"op_name": "string", "args": "string"}, ("count",), ROWS, MOST_TEXT) as content:
        yield from _records(file, content.records())


def _records(file: ForeignFile, rows: Iterator[dict[str, Any]]) -> Iterator[Record]:
    builder = RecordBuilder("backendbench", file.losses)
    calls = 0
    for row in rows:
        op, text, count = row["op_name"], row["args"], row.get("count", 1)
        count = max(count, 1) if type(count) is int else 1
        calls += count
        if calls > MOST_CALLS and not file.unbounded:
            raise file.refusal(f"it counts more than {MOST_CALLS:,} calls")
        if not isinstance(op, str) or OPERATOR_LINE.fullmatch(f"Operator: {op}") is None:
            file.losses.skip("?", "a row has no operator name", count)
            continue
        try:
            args, kwargs = parse_call(text.strip().strip("'\"") if isinstance(text, str) else "")
            args, kwargs = map_leaves(_unquoted, args), map_leaves(_unquoted, kwargs)
        except ValueError as error:
            file.losses.skip(op, str(error), count)
            continue
        call = registered(op, args, kwargs, file.losses)
        builder.add_call(call.op, call.args, call.kwargs, count=count)
        yield from builder.ready()
    yield from builder.end()


def _unquoted(value: Any) -> Any:
    """Return the dtype or device that some rows have in quotation marks."""
    if not isinstance(value, str):
        return value
    device = DEVICE.fullmatch(value)
    return DTYPE_OF.get(value, value) if device is None else device_named(device[1] or device[2])


def write(trace: Trace, file: IO[bytes], losses: Losses) -> None:
    """Write one row per signature, sorted by operator and falling count."""
    arrow, parquet = needed("pyarrow", EXTRA), needed("pyarrow.parquet", EXTRA)
    rows = sorted(_rows(trace, losses), key=lambda row: (row["op_name"], -row["count"]))
    schema = _schema(arrow)
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for first in range(0, len(rows), GROUP):
            writer.write_table(arrow.Table.from_pylist(rows[first : first + GROUP], schema))


def _schema(arrow: Any) -> Any:
    """Return the columns that BackendBench's own converter writes."""
    return arrow.schema(
        [
            *(arrow.field(name, arrow.string()) for name in ("uuid", "op_name", "args")),
            arrow.field("count", arrow.int64()),
            *(arrow.field(name, arrow.bool_()) for name in ("is_synthetic", "included_in_benchmark")),
            arrow.field("why_excluded", arrow.list_(arrow.string())),
            *(arrow.field(name, arrow.float64()) for name in ("runtime_ms", "relative_runtime_to_kernel_launch")),
            *(arrow.field(name, arrow.bool_()) for name in ("runnable", "is_overhead_dominated_op")),
        ]
    )


def _rows(trace: Trace, losses: Losses) -> Iterator[dict[str, Any]]:
    """Yield one row per operator and text; signatures with the same text are one row."""
    signatures = {item.number: item for item in trace.signatures}
    groups = trace.own_calls.groupby("signature")["time_ns"]
    counts: Counter[tuple[str, str]] = Counter()
    times_ns: dict[tuple[str, str], float] = defaultdict(float)
    for number, count, time_ns in zip(groups.size().index, groups.size(), groups.median(), strict=True):
        signature = signatures[int(number)]
        try:
            text = call_text(_with_plain_devices(signature))
        except ValueError as error:
            losses.skip(signature.op, str(error), int(count))
            continue
        counts[signature.op, text] += int(count)
        times_ns[signature.op, text] += float(time_ns) * int(count)
    for (op, text), count in counts.items():
        time_ms = times_ns[op, text] / count / 1e6
        yield {
            "uuid": hashlib.sha256(text.encode() + op.encode()).hexdigest(),
            "op_name": op,
            "args": text,
            "count": count,
            "is_synthetic": False,
            "included_in_benchmark": True,
            "why_excluded": [],
            "runtime_ms": time_ms if time_ms > 0 else math.nan,
            "relative_runtime_to_kernel_launch": math.nan,
            "runnable": True,
            "is_overhead_dominated_op": False,
        }


def _with_plain_devices(signature: Signature) -> Signature:
    """Return a signature with devices as names, the only form that readers of such files know."""

    def plain(value: Any) -> Any:
        return str(value) if isinstance(value, torch.device) else value

    return replace(signature, args=map_leaves(plain, signature.args), kwargs=map_leaves(plain, signature.kwargs))


formats.register("backendbench")(
    Format(
        "BackendBench's operators and their inputs: Parquet, counts and shapes",
        recognizes,
        read,
        write,
        suffixes=(".backendbench.parquet",),
        defaults=(NO_TIMES, NO_VALUES, NO_GRADIENTS, NO_DEVICE, SYNTHETIC),
        is_collection=True,
    )
)
