"""Shapes of matrix products in aiter's CSV files, tuned and untuned.

    M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle
    64,256,5120,False,torch.bfloat16,torch.float32,False,False

A row is the product of a (M, K) input and the transpose of a (N, K) weight, in batches of B if the file has that
column. Tuned files also have the time of the fastest kernel in the column `us`.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from opgrip.traces.formats.building import NO_DEVICE, NO_GRADIENTS, NO_TIMES, NO_VALUES, RecordBuilder, tensor_of
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, formats
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import Record

SIZES = ("M", "N", "K")
# first columns by which files of fused mixtures of experts are recognized
MIXTURE = ("token", "model_dim", "inter_dim", "expert", "topk")
MOST_ROWS = 200_000
MOST_US = 1e9
# start of the names of files about quantized products; most of these files do not name the dtypes
QUANTIZED_NAME = re.compile(r"a\d+w\d+")
NO_DTYPE = "dtypes of tensors: the file has none, so they are bfloat16"

Row = Mapping[str, str]
Call = tuple[str, list[Any], dict[str, Any]]


SEPARATORS = ",;\t"  # separators of columns; a spreadsheet may write others than commas


def recognizes(head: Head) -> bool:
    columns = _columns(head.start.partition(b"\n")[0].decode(errors="replace"))[0]
    return set(columns) >= set(SIZES) or set(columns) >= set(MIXTURE)


def read(file: ForeignFile) -> Iterator[Record]:
    """Yield the records of a file of tuned matrix products, with one call per row."""
    lines = file.lines()
    columns, separator = _columns(next(lines, ""))
    if not recognizes(Head(file.path, "", ",".join(columns).encode())):
        raise file.damage("its first line does not name the columns M, N and K")
    is_timed = "us" in columns
    if is_timed:
        file.losses.defaults[:] = [text for text in file.losses.defaults if text != NO_TIMES]
    builder = RecordBuilder("aiter", file.losses, is_timed=is_timed)
    for number, line in enumerate(lines):
        if number >= MOST_ROWS and not file.unbounded:
            raise file.refusal(f"it has more than {MOST_ROWS:,} rows")
        if not line.strip():
            continue
        row = dict(zip(columns, _cells(line, separator), strict=False))
        try:
            op, args, kwargs = _call(row, file)
            duration_ns = _duration_ns(row["us"]) if is_timed else 0
        except (ValueError, KeyError) as error:
            reason = f"a row has no column {error}" if isinstance(error, KeyError) else str(error)
            file.losses.skip("fused_moe" if "token" in columns else "gemm", reason)
            continue
        builder.add_call(op, args, kwargs, duration_ns=duration_ns, device_ns=duration_ns if is_timed else -1)
        yield from builder.ready()
    yield from builder.end()


def _columns(line: str) -> tuple[list[str], str]:
    """Return the names in the first line, and the separator between them."""
    separator = max(SEPARATORS, key=line.count)
    return _cells(line, separator), separator


def _cells(line: str, separator: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line.lstrip("\ufeff")], delimiter=separator), [])]
    except csv.Error:
        return []


def _call(row: Row, file: ForeignFile) -> Call:
    """Return the operator and arguments of a row; raise `ValueError` if torch has no such operator."""
    if "token" in row:
        raise ValueError("a fused mixture of experts, which is not one operator of torch")
    if row.get("q_dtype_w") or QUANTIZED_NAME.match(file.path.name) or row.get("scaleAB") == "True":
        raise ValueError("a quantized product, for which the file does not have the shapes of the scales")
    rows, columns, inner = (_size(row[name]) for name in SIZES)
    dtype = row.get("dtype") or "bfloat16"
    if "dtype" not in row and NO_DTYPE not in file.losses.defaults:
        file.losses.defaults.append(NO_DTYPE)
    batch = [_size(row["B"])] if "B" in row else []
    left = tensor_of([*batch, rows, inner], dtype)
    if batch:
        right = tensor_of([*batch, inner, columns], dtype, [columns * inner, 1, inner])
        return "aten.bmm.default", [left, right], {}
    weight = tensor_of([columns, inner], dtype)
    bias = [tensor_of([columns], dtype)] if row.get("bias") == "True" else []
    result = tensor_of([], row.get("outdtype") or dtype).dtype
    if result == left.dtype:
        return "aten.linear.default", [left, weight, *bias], {}
    return _widening(left, weight, bias, result)


def _widening(left: TensorSpec, weight: TensorSpec, bias: list[TensorSpec], result: torch.dtype) -> Call:
    """Return the call of a matrix product whose result has another dtype than its operands."""
    right = tensor_of(weight.shape[::-1], weight.dtype, weight.stride[::-1] if weight.stride else None)
    return f"aten.{'addmm' if bias else 'mm'}.dtype", [*bias, left, right, result], {}


def _size(text: str) -> int:
    if not re.fullmatch(r"\d{1,10}", text):
        raise ValueError(f"expected a size in digits, got {text[:40]!r}")
    return int(text)


def _duration_ns(text: str) -> int:
    try:
        us = float(text)
    except ValueError:
        us = math.nan
    if not 0 <= us < MOST_US:
        raise ValueError(f"expected a time in us, got {text[:40]!r}")
    return round(us * 1000)


formats.register("aiter")(
    Format(
        "aiter's shapes of matrix products, tuned or not: CSV",
        recognizes,
        read,
        defaults=(NO_TIMES, NO_VALUES, NO_GRADIENTS, NO_DEVICE),
        is_collection=True,
    )
)
