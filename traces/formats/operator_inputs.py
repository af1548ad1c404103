"""Reader and writer of files that list arguments of operators and how often each occurs.

They are text (TritonBench, torch's `OperatorInputsMode`) or Parquet with the same text in a column (BackendBench):

    Operator: aten.add.Tensor
    cnt: 12, ((T([16, 128], f16), T([16, 128], f16, stride=(0, 1))), {'alpha': 2})
"""

from __future__ import annotations

import ast
import hashlib
import math
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any

import torch

from opgrip.cli.plugins import needed
from opgrip.errors import FormatError
from opgrip.traces.formats.building import (
    NO_DEVICE,
    NO_GRADIENTS,
    NO_TIMES,
    NO_VALUES,
    RecordBuilder,
    converted,
    tensor_of,
)
from opgrip.traces.formats.operator_schemas import registered
from opgrip.traces.io.foreign_files import MOST_BYTES, ForeignFile, Format, Head, Losses, formats
from opgrip.traces.io.parquet_file import MAGIC, TooLargeError, footer_of, read_parquet_table
from opgrip.traces.schema.arguments import TensorSpec, map_leaves
from opgrip.traces.schema.json_values import DECOMPRESSED, Allowance, check_hashes
from opgrip.traces.schema.records import OPERATOR, Record, Signature
from opgrip.traces.schema.tensor_specs import DTYPES, LAYOUTS, MEMORY_FORMATS, contiguous, plain_name
from opgrip.traces.table.trace import Trace

DTYPE_OF = {
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "b8": torch.bool,
    "u8": torch.uint8,
    "c32": torch.complex32,
    "c64": torch.complex64,
    "c128": torch.complex128,
}
SHORT = {dtype: name for name, dtype in DTYPE_OF.items()}
OPERATOR_LINE = re.compile(r"Operator: ([\w.:]+)")
CALL_LINE = re.compile(r"cnt: (\d{1,9}), (.+)")
MOST_CALLS = 1_000_000  # maximum number of calls of an untrusted file; a single line may have a count that high
# maximum number of characters of a call, each of which may cost half a KB to parse; the longest known call has 5,000
MOST_TEXT = 1 << 18
LARGEST = 1 << 64  # maximum of integers


def recognizes(head: Head) -> bool:
    first = next(iter(head.start.split(b"\n")), b"").decode(errors="replace").strip()
    return OPERATOR_LINE.fullmatch(first) is not None


def read(file: ForeignFile) -> Iterator[Record]:
    return _records("tritonbench", file, _counted_lines(file))


def _counted_lines(file: ForeignFile) -> Iterator[tuple[str, str, int]]:
    op = ""
    for number, line in enumerate(file.lines(), 1):
        if named := OPERATOR_LINE.fullmatch(line.strip()):
            op = named[1]
        elif counted := CALL_LINE.fullmatch(line.strip()):
            yield op, counted[2], int(counted[1])
        elif line.strip():
            unknown = "a line is neither 'Operator: NAME' nor 'cnt: N, ARGUMENTS'"
            file.losses.skip(op or "?", unknown if op else f"line {number} is not a call")


def _records(name: str, file: ForeignFile, rows: Iterator[tuple[str, str, int]]) -> Iterator[Record]:
    builder = RecordBuilder(name, file.losses)
    calls = 0
    for op, text, count in rows:
        calls += count
        file.check(calls, MOST_CALLS, "it counts more than {:,} calls")
        with builder.skipping(op, count):
            args, kwargs = parse_call(text)
            if name == "backendbench":
                args, kwargs = map_leaves(_unquoted, args), map_leaves(_unquoted, kwargs)
            call = registered(op, args, kwargs, file.losses)
            builder.add_call(call.op, call.args, call.kwargs, count=count)
        yield from builder.ready()
    yield from builder.end()


def parse_call(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and named arguments of a call from a text such as `((T([2, 3], f32), 1), {'alpha': 2})`."""
    if len(text) > MOST_TEXT:
        raise ValueError(f"the arguments have more than {MOST_TEXT:,} characters")
    with warnings.catch_warnings():
        # Python warns about numbers that run into words; they are reported like everything that cannot be read
        warnings.simplefilter("ignore")
        value = parse_literals(text)
    match value:
        case (tuple() as args, dict() as kwargs) if all(isinstance(name, str) for name in kwargs):
            return args, kwargs
    raise ValueError(f"expected a tuple and a dictionary of arguments, got {text[:60]!r}")


def parse_literals(text: str) -> Any:
    try:
        return literal(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, TypeError, KeyError) as error:
        raise ValueError(f"the arguments are not written as Python literals: {text[:60]!r}") from error


def literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() as value) if value >= LARGEST:
            raise ValueError(f"an integer has {value.bit_length()} bits, more than 64")
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) as operand):
            return -literal(operand)
        case ast.Tuple(elts=items):
            return tuple(map(literal, items))
        case ast.List(elts=items):
            return list(map(literal, items))
        case ast.Dict(keys=keys, values=values):
            pairs = [(literal(key), value) for key, value in zip(keys, values, strict=True) if key is not None]
            check_hashes([key for key, _ in pairs])
            return {key: literal(value) for key, value in pairs}
        case ast.Name(id="inf" | "nan" as name):
            return float(name)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
            return float("-inf")
        case ast.Name(id=name) if name in DTYPE_OF:
            return DTYPE_OF[name]
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return _of_torch(name)
        case ast.Call(
            func=ast.Name(id="device") | ast.Attribute(value=ast.Name(id="torch"), attr="device"),
            args=[ast.Constant(value=str() as name)],
        ):
            return device_named(name)
        case ast.Call(func=ast.Name(id="T"), args=args, keywords=keywords):
            return _tensor(*map(literal, args), **{word.arg or "": literal(word.value) for word in keywords})
    raise ValueError(f"unsupported argument: {ast.unparse(node)[:60]}")


def _of_torch(name: str) -> Any:
    value = {**DTYPES, **LAYOUTS, **MEMORY_FORMATS}.get(name)
    if value is None:
        raise ValueError(f"torch.{name[:60]} is not a dtype, layout or memory format")
    return value


def device_named(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device: {name[:60]!r}") from error


def _tensor(*args: Any, **words: Any) -> TensorSpec:
    if len(args) not in (2, 3) or "made_of" in words or not set(words) <= {"stride", "layout"}:
        raise ValueError(
            f"expected a tensor as T([sizes], dtype), got T with {len(args)} arguments and keywords {[*words][:3]}"
        )
    shape, dtype, *rest = args
    # the third argument is a layout in some files and the strides in others
    strides = rest if rest and isinstance(rest[0], list | tuple) else [words["stride"]] if "stride" in words else []
    layout = rest[0] if rest and not strides else words.get("layout", torch.strided)
    if layout is not torch.strided:
        raise ValueError(f"unsupported: tensor of layout {str(layout)[:40]} (the file does not have its contents)")
    return tensor_of(shape, dtype, strides[0] if strides else None)


def write(trace: Trace, file: IO[bytes], losses: Losses) -> None:
    lines: dict[str, list[tuple[int, str]]] = {}
    for signature, text, calls in converted(trace, losses, call_text):
        lines.setdefault(signature.op, []).append((len(calls), text))
    for op, own in sorted(lines.items()):
        file.write(f"Operator: {op}\n".encode())
        file.writelines(f"cnt: {count}, {text}\n".encode() for count, text in sorted(own, key=lambda call: -call[0]))


def call_text(signature: Signature) -> str:
    if signature.kind != OPERATOR:
        raise ValueError("not an operator of torch's dispatcher")
    words = ", ".join(f"{name!r}: {_text(value)}" for name, value in signature.kwargs.items())
    return f"({_text(signature.args)}, {{{words}}})"


def _text(value: Any) -> str:
    match value:
        case None | bool() | int() | float() | str():
            return repr(value)
        case list():
            return f"[{', '.join(map(_text, value))}]"
        case tuple():
            return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
        case torch.dtype():
            return SHORT.get(value, str(value))
        case torch.device():
            return f"device({str(value)!r})"
        case torch.layout() | torch.memory_format():
            return str(value)
        case TensorSpec(layout=torch.strided, stride=tuple() as stride, made_of=None, cls=None):
            strided = "" if stride == contiguous(value.shape) else f", stride={_text(stride)}"
            return f"T({_text(list(value.shape))}, {SHORT.get(value.dtype, plain_name(value.dtype))}{strided})"
    raise ValueError(f"the format cannot represent a value of type {type(value).__name__}")


formats.register("tritonbench")(
    Format(
        "TritonBench's operator inputs: text, counts and shapes",
        recognizes,
        read,
        write,
        suffixes=(".txt",),
        defaults=(NO_TIMES, NO_VALUES, NO_GRADIENTS, NO_DEVICE),
        is_collection=True,
    )
)


MOST_ROWS = Allowance("rows", 10_000_000, 1)  # maximum number of rows, because repeated rows take no bytes in the file
GROUP = 4096  # number of rows of a group in a written file
DEVICE = re.compile(r"torch\.device\(['\"]?([\w:]+)['\"]?\)|(cuda(?::\d+)?|cpu|meta)")
SYNTHETIC = "rows with count 0, which no model called: each is replayed as one call"


def recognizes_rows(head: Head) -> bool:
    if not head.start.startswith(MAGIC):
        return False
    footer = footer_of(head.path)
    return b"op_name" in footer and b"args" in footer


def read_rows(file: ForeignFile) -> Iterator[Record]:
    size = file.path.stat().st_size
    most_bytes = DECOMPRESSED.of(size)
    try:
        names = ("op_name", "args", "count")
        table = read_parquet_table(
            file.path, MOST_ROWS.of(size), min(MOST_BYTES, most_bytes), names, not file.unbounded
        )
    except TooLargeError as error:
        raise file.refusal(str(error)) from error
    except FormatError as error:
        raise file.damage(str(error)) from error
    for name in ("op_name", "args"):
        kind = str(table.schema.field(name).type) if name in table.schema.names else "missing"
        # texts arrive as dictionaries
        if not kind.startswith(("dictionary<values=string", "dictionary<values=large_string")):
            raise file.damage(f"the column {name} has the type {kind[:40]}, not string")
    yield from _records("backendbench", file, _counted_rows(file, table, most_bytes))


def _counted_rows(file: ForeignFile, table: Any, most_bytes: int) -> Iterator[tuple[str, str, int]]:
    text_bytes = 0
    for batch in table.to_batches():
        counts = batch["count"].to_pylist() if "count" in batch.schema.names else [1] * batch.num_rows
        for row, count in enumerate(counts):
            # rows may share one long text
            op, text = (batch[name][row].as_py() or "" for name in ("op_name", "args"))
            text_bytes += len(op) + len(text)
            file.check(text_bytes, most_bytes, "the texts of its rows have more than {:,} bytes")
            count = max(count, 1) if type(count) is int else 1
            if OPERATOR_LINE.fullmatch(f"Operator: {op}") is None:
                file.losses.skip("?", "a row has no operator name", count)
                continue
            yield op, text.strip().strip("'\""), count


def _unquoted(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    device = DEVICE.fullmatch(value)
    return DTYPE_OF.get(value, value) if device is None else device_named(device[1] or device[2])


def write_rows(trace: Trace, file: IO[bytes], losses: Losses) -> None:
    arrow, parquet = needed("pyarrow"), needed("pyarrow.parquet")
    rows = sorted(_rows(trace, losses), key=lambda row: (row["op_name"], -row["count"]))
    schema = _schema(arrow)
    parquet.write_table(arrow.Table.from_pylist(rows, schema), file, row_group_size=GROUP, compression="zstd")


def _schema(arrow: Any) -> Any:
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
    counts: Counter[tuple[str, str]] = Counter()
    times_ns: dict[tuple[str, str], float] = defaultdict(float)
    for signature, text, calls in converted(trace, losses, _text_of_row):
        counts[signature.op, text] += len(calls)
        times_ns[signature.op, text] += float(calls["time_ns"].median()) * len(calls)
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


def _text_of_row(signature: Signature) -> str:
    # BackendBench only reads devices that are strings
    args, kwargs = map_leaves(
        lambda leaf: str(leaf) if isinstance(leaf, torch.device) else leaf, (signature.args, signature.kwargs)
    )
    return call_text(replace(signature, args=args, kwargs=kwargs))


formats.register("backendbench")(
    Format(
        "BackendBench's operators and their inputs: Parquet, counts and shapes",
        recognizes_rows,
        read_rows,
        write_rows,
        suffixes=(".backendbench.parquet",),
        defaults=(NO_TIMES, NO_VALUES, NO_GRADIENTS, NO_DEVICE, SYNTHETIC),
        is_collection=True,
    )
)
