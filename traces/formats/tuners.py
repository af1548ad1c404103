"""Lists of recorded matrix products, convolutions and attentions for tuners of kernels, and reader of aiter's CSV
files.

A tuner runs the kernels of a library on each problem of a list, and writes the fastest ones to a file of tuned entries.

    M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle
    64,256,5120,False,torch.bfloat16,torch.float32,False,False

A row of aiter's files is the product of a (M, K) input and the transpose of a (N, K) weight, in batches of B if the
file has that column.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from opgrip.errors import UserError
from opgrip.traces.formats.building import NO_DEVICE, NO_GRADIENTS, NO_TIMES, NO_VALUES, RecordBuilder, tensor_of
from opgrip.traces.formats.operator_schemas import NotConverted
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, formats, head_of
from opgrip.traces.schema.arguments import TensorSpec, tensors
from opgrip.traces.schema.records import Record, Signature
from opgrip.traces.schema.tensor_specs import contiguous, plain_name
from opgrip.traces.table.trace import Trace

MOST_ENTRIES = 200_000  # maximum number of rows that are read from a file of tuned entries
# indices of the bias, the left and the right matrix among the arguments of matrix products
PRODUCTS = {
    **dict.fromkeys(("mm", "bmm"), (None, 0, 1)),
    **dict.fromkeys(("addmm", "baddbmm"), (0, 1, 2)),
    "linear": (2, 0, 1),
    "_scaled_mm": (4, 0, 1),
}
CONVOLUTIONS = ("convolution", "convolution_backward")
# names of dtypes in TunableOp, hipBLASLt and oneDNN
NAMES = {
    "float32": ("float", "f32_r", "f32"),
    "float64": ("double", "f64_r", "f64"),
    "bfloat16": ("BFloat16", "bf16_r", "bf16"),
    "float16": ("Half", "f16_r", "f16"),
    "float8_e4m3fn": ("Float8_e4m3fn", "f8_r", "f8_e4m3"),
    "float8_e5m2": ("Float8_e5m2", "bf8_r", "f8_e5m2"),
    "float8_e4m3fnuz": ("Float8_e4m3fnuz", "f8_fnuz_r", ""),
    "float8_e5m2fnuz": ("Float8_e5m2fnuz", "bf8_fnuz_r", ""),
}
TORCH, BLAS, DNN = 0, 1, 2


class Problem(NamedTuple):
    """Recorded calls of one signature, for which a tuner may find a faster kernel.

    name : operator without namespace and overload
    """

    signature: Signature
    name: str
    calls: int
    share: float


class Entry(NamedTuple):
    """A problem as lines of text in the form that a tuner reads.

    key : columns that identify the problem in a file of tuned entries, and their values
    """

    lines: tuple[str, ...]
    key: Mapping[str, str]
    group: str = ""


class Matrix(NamedTuple):
    """Memory layout of a matrix.

    by_columns : True if the elements of a column are adjacent, False if the elements of a row are
    leading : number of elements from one column to the next if stored by columns, else from one row to the next
    step : number of elements from one matrix of a batch to the next
    """

    by_columns: bool
    leading: int
    step: int


class Product(NamedTuple):
    """A batch of products of matrices (M, K) and (K, N), or a single product if `batch` is None.

    scales : 0 without scales, 1 with one for each matrix, 2 with one for each row and column
    """

    batch: int | None
    m: int
    n: int
    k: int
    left: Matrix
    right: Matrix
    dtypes: tuple[str, str, str]
    bias: str | None
    scales: int

    @property
    def layout(self) -> str:
        return "".join("T" if matrix.by_columns else "N" for matrix in (self.right, self.left))


def problems_of(trace: Trace) -> list[Problem]:
    signatures = {signature.number: signature for signature in trace.signatures}
    table, problems = trace.summary("signature"), []
    for number, calls, share in zip(*(table[name].tolist() for name in ("signature", "calls", "share")), strict=True):
        signature = signatures[number]
        namespace, _, name = signature.op.rpartition(".")[0].partition(".")
        if namespace == "aten" and (name in PRODUCTS or name in CONVOLUTIONS or "scaled_dot_product" in name):
            problems.append(Problem(signature, name, calls, share))
    return problems


def _matrix(rows: int, columns: int, stride: Sequence[int]) -> Matrix:
    step = stride[0] if len(stride) > 2 else rows * columns
    if stride[-1] == 1 and (stride[-2] >= columns or rows == 1):
        return Matrix(False, max(stride[-2], columns), step)
    if stride[-2] == 1 and (stride[-1] >= rows or columns == 1):
        return Matrix(True, max(stride[-1], rows), step)
    # torch copies a matrix that is stored in neither order
    return Matrix(False, columns, rows * columns)


def _product(problem: Problem) -> Product:
    if problem.name not in PRODUCTS:
        raise NotConverted("not a matrix product, the only kind of call that the tuner takes")
    args = problem.signature.args
    bias, left, right = (None if at is None or at >= len(args) else args[at] for at in PRODUCTS[problem.name])
    bias = problem.signature.kwargs.get("bias", bias)
    if not (isinstance(left, TensorSpec) and isinstance(right, TensorSpec) and left.stride and right.stride):
        raise NotConverted("one of its matrices is sparse or not a tensor")
    is_linear, batch = problem.name == "linear", left.shape[0] if "bmm" in problem.name else None
    m, k, n = prod(left.shape[batch is not None : -1]), left.shape[-1], right.shape[0 if is_linear else -1]
    requested = [item for item in (*args, *problem.signature.kwargs.values()) if isinstance(item, torch.dtype)]
    out = requested[0] if requested else next(iter(tensors(problem.signature.outputs)), left).dtype
    scale = args[2] if problem.name == "_scaled_mm" and len(args) > 2 else None
    return Product(
        batch,
        *(m, n, k),
        left=_matrix(m, k, left.stride if len(left.shape) == (2 if batch is None else 3) else (k, 1)),
        right=_matrix(k, n, right.stride[::-1] if is_linear else right.stride),
        dtypes=(plain_name(left.dtype), plain_name(right.dtype), plain_name(out)),
        bias=plain_name(bias.dtype) if isinstance(bias, TensorSpec) and bias.shape == (n,) else None,
        scales=0 if scale is None else 2 if isinstance(scale, TensorSpec) and prod(scale.shape) > 1 else 1,
    )


def _named(library: int, *dtypes: str) -> list[str]:
    names = [NAMES.get(dtype, ("", "", ""))[library] for dtype in dtypes]
    if not all(names):
        raise NotConverted(f"the tuner does not support the dtype {dtypes[names.index('')]}")
    return names


def _aiter(problem: Problem) -> Entry:
    product = _product(problem)
    if not product.right.by_columns or product.left.by_columns:
        raise NotConverted(
            "the tuner only takes products of a row-major matrix with a transposed one, as in linear layers"
        )
    dtype, _, out = (f"torch.{name}" for name in product.dtypes)
    values: dict[str, Any] = {"M": product.m, "N": product.n, "K": product.k}
    if product.batch is None:
        values |= {"bias": product.bias is not None, "dtype": dtype, "outdtype": out}
        values |= {"scaleAB": product.scales > 0, "bpreshuffle": False}
    elif {*product.dtypes} == {"bfloat16"}:
        values = {"B": product.batch, **values}
    else:
        raise NotConverted("the tuner only takes batched products of bfloat16")
    key = {name: str(value) for name, value in values.items()}
    return Entry((",".join(key.values()),), key, "batched" if "B" in key else "")


def _tunableop(problem: Problem) -> Entry:
    product = _product(problem)
    left, right, out = _named(TORCH, *product.dtypes)
    kind, dtypes, batch, rest = "Gemm", left, "", ""
    if product.scales:
        bias = "None" if product.bias is None else _named(TORCH, product.bias)[0]
        kind, dtypes, rest = "ScaledGemm", f"{right}_{left}_{out}", f"_rw_{product.scales - 1}_bias_{bias}"
    elif product.batch is not None:
        kind, batch = "GemmStridedBatched", f"_B_{product.batch}"
    elif product.bias is not None and min(product.n, product.k) > 1 and not problem.signature.kwargs:
        kind = "GemmAndBias"
    sizes = f"{product.n}_{product.m}_{product.k}{batch}"
    leading = f"{product.right.leading}_{product.left.leading}_{product.n}"
    parameters = f"{product.layout.lower()}_{sizes}_ld_{leading}{rest}"
    key = {"operator": f"{kind}TunableOp_{dtypes}_{product.layout}", "parameters": parameters}
    return Entry((",".join(key.values()),), key)


def _hipblaslt(problem: Problem) -> Entry:
    product = _product(problem)
    (left, right, out), m, n = _named(BLAS, *product.dtypes), product.n, product.m
    compute = "f64_r" if left == "f64_r" else "f32_r"
    steps = (0, 0, 0) if product.batch is None else (product.right.step, product.left.step, m * n)
    fields: dict[str, Any] = {"function": "matmul", "M": m, "N": n, "K": product.k}
    fields |= {"lda": product.right.leading, "ldb": product.left.leading, "ldc": m, "ldd": m}
    fields |= {f"stride_{name}": steps[index] for name, index in zip("abcd", (0, 1, 2, 2), strict=True)}
    fields |= {"alpha": 1, "beta": 0, "transA": product.layout[0], "transB": product.layout[1]}
    fields |= {"batch_count": product.batch or 1, "a_type": right, "b_type": left, "c_type": out, "d_type": out}
    fields |= {"scale_type": compute, "compute_type": compute}
    if product.bias is not None:
        fields |= {"bias_vector": 1, "bias_type": _named(BLAS, product.bias)[0]}
    if product.scales:
        fields |= {"scaleA": product.scales, "scaleB": product.scales}
    text = ", ".join(f"{name}: {value}" for name, value in fields.items())
    # hipBLASLt does not compare the other columns of its tuned entries
    same = ("M", "N", "K", "transA", "transB", "batch_count", "a_type", "b_type", "c_type", "d_type", "compute_type")
    return Entry((f"- {{ {text} }}",), {name if name[1:] else name.lower(): str(fields[name]) for name in same})


def _benchdnn(problem: Problem) -> Entry:
    if problem.name in CONVOLUTIONS:
        return _convolution(problem)
    product = _product(problem)
    batch = () if product.batch is None else (product.batch,)
    strides, shapes = [], []
    for *shape, matrix in ((product.m, product.k, product.left), (product.k, product.n, product.right)):
        order = (1, matrix.leading) if matrix.by_columns else (matrix.leading, 1)
        strides.append("x".join(map(str, (*((matrix.step,) if batch else ()), *order))))
        shapes.append("x".join(map(str, (*batch, *shape))))
    bias = "" if product.bias is None else f" --bia_dt={_named(DNN, product.bias)[0]} --bia_mask={4 if batch else 2}"
    options = f"--dt={':'.join(_named(DNN, *product.dtypes))} --strides={':'.join(strides)}:{bias}"
    return Entry((f"--reset {options} {':'.join(shapes)}",), {}, "matmul")


def _convolution(problem: Problem) -> Entry:
    args, backward = problem.signature.args, problem.name == "convolution_backward"
    result: Any = args[0] if backward else next(iter(tensors(problem.signature.outputs)), None)
    source, weight, bias, stride, padding, dilation, transposed, _, groups = args[backward : 9 + backward]
    if not all(isinstance(item, TensorSpec) and item.stride for item in (source, weight, result)):
        raise NotConverted("one of its tensors is sparse, or its result is not recorded")
    rank = len(source.shape) - 2
    sizes = {"i": source.shape[2:], "o": result.shape[2:], "k": weight.shape[2:], "s": stride, "p": padding}
    sizes["d"] = [step - 1 for step in dilation]
    parts = [f"g{groups}mb{source.shape[0]}ic{source.shape[1]}oc{result.shape[1]}"]
    for name, size in sizes.items():
        each = [*size] if len(size) == rank else [*size] * rank
        parts.append("".join(f"{name}{axis}{item}" for axis, item in zip("dhw"[-rank:], each, strict=True)))
    directions = ["FWD_D" if bias is None else "FWD_B"]
    if backward:
        of_input, of_weight, of_bias = args[-1]
        directions = ["BWD_D"] * of_input + ["BWD_WB" if of_bias else "BWD_W"] * of_weight
    dtypes = ":".join(_named(DNN, *(plain_name(item.dtype) for item in (source, weight, result))))
    tags = "" if source.stride == contiguous(source.shape) else " --stag=axb --dtag=axb"
    lines = [f"--reset --dir={item} --dt={dtypes}{tags} {'_'.join(parts)}" for item in directions]
    return Entry(tuple(lines), {}, "deconv" if transposed else "conv")


def _triton(problem: Problem) -> Entry:
    if problem.name in PRODUCTS:
        product = _product(problem)
        sizes = {"B": product.batch, "M": product.m, "N": product.n, "K": product.k}
        sizes, dtypes = {name: size for name, size in sizes.items() if size is not None}, list(product.dtypes)
    else:
        own = [item for item in problem.signature.args if isinstance(item, TensorSpec)]
        named = dict(zip("qkv" if "dot_product" in problem.name else "xw", own, strict=False))
        sizes = {f"{name}{axis}": size for name, item in named.items() for axis, size in enumerate(item.shape)}
        dtypes = [plain_name(item.dtype) for item in named.values()]
    key = [*sizes.values(), *(f"torch.{dtype}" for dtype in dtypes)]
    return Entry((json.dumps({"operator": problem.name, "names": [*sizes], "key": key}),), {"key": json.dumps(key)})


def _commented(lines: Sequence[str], count: int, share: float) -> list[str]:
    return [f"# count {count}, {share:.2%} of the time", *lines]


SEPARATORS = ",;\t"  # separators of columns; a spreadsheet may write others than commas


def _csv_rows(file: ForeignFile) -> Iterator[Mapping[str, str]]:
    columns: list[str] = []
    separator = ""
    for line in file.lines():
        cells = _cells(line, separator)
        if {"M", "transA", "token"} & {*cells}:
            columns, separator = cells, _separator(line)
        elif columns and line.strip():
            yield dict(zip(columns, cells, strict=False))


def _separator(line: str) -> str:
    return max(SEPARATORS, key=line.count)


def _cells(line: str, separator: str = "") -> list[str]:
    words = csv.reader([line.lstrip("\ufeff")], delimiter=separator or _separator(line))
    try:
        return [cell.strip() for cell in next(words, [])]
    except csv.Error:
        return []


def _tunableop_rows(file: ForeignFile) -> Iterator[Mapping[str, str]]:
    for line in file.lines():
        operator, *others = line.split(",")
        if "TunableOp_" in operator and others:
            yield {"operator": operator.strip(), "parameters": others[0].strip()}


def _triton_rows(file: ForeignFile) -> Iterator[Mapping[str, str]]:
    content = file.parse(file.content())
    yield {"key": json.dumps(content.get("key") if isinstance(content, dict) else None)}


class Tuner(NamedTuple):
    """A tuner of kernels.

    headers : first line of each list, by the list's name
    mark : text at the start of a file of tuned entries; empty if the tuner writes no such file
    """

    entry: Callable[[Problem], Entry]
    counted: Callable[[Sequence[str], int, float], list[str]]
    headers: Mapping[str, str]
    mark: str = ""
    rows: Callable[[ForeignFile], Iterator[Mapping[str, str]]] = _csv_rows


HEADERS = {"": "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,count", "batched": "B,M,N,K,count"}
TUNERS = {
    "aiter": Tuner(_aiter, lambda lines, count, share: [f"{line},{count}" for line in lines], HEADERS, "M,N,K"),
    "tunableop": Tuner(_tunableop, _commented, {}, "TunableOp_", _tunableop_rows),
    "hipblaslt": Tuner(_hipblaslt, _commented, {}, "transA,"),
    "benchdnn": Tuner(_benchdnn, _commented, {}),
    "triton": Tuner(
        _triton,
        lambda lines, count, share: [
            json.dumps({**json.loads(line), "count": count, "share": round(share, 6)}) for line in lines
        ],
        {},
        '"configs_timings"',
        _triton_rows,
    ),
}


def lists_of(problems: Sequence[Problem], tuner: Tuner) -> tuple[dict[str, list[str]], Counter[tuple[str, str]]]:
    """Return the lists that a tuner reads for these problems, and the number of calls that it does not support.

    The lists are by name, the numbers of calls by operator and reason.
    """
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    shares: dict[tuple[str, tuple[str, ...]], float] = {}
    skipped: Counter[tuple[str, str]] = Counter()
    for problem in problems:
        try:
            lines, _, group = tuner.entry(problem)
        except NotConverted as error:
            skipped[problem.name, str(error)] += problem.calls
            continue
        counts[group, lines] += problem.calls
        shares[group, lines] = shares.get((group, lines), 0.0) + problem.share
    lists: dict[str, list[str]] = {}
    for (group, lines), share in sorted(shares.items(), key=lambda item: -item[1]):
        header = [tuner.headers[group]] if group in tuner.headers else []
        lists.setdefault(group, header).extend(tuner.counted(lines, counts[group, lines], share))
    # the first list gets the name that the user chose, whichever has the largest share
    return dict(sorted(lists.items())), skipped


def read_tuned(path: Path) -> tuple[Tuner, list[Mapping[str, str]]]:
    file, start = ForeignFile(path), head_of(path).start.decode(errors="replace")
    tuner = next((tuner for tuner in TUNERS.values() if tuner.mark and tuner.mark in start), None)
    if tuner is None:
        raise UserError(f"{path} has no tuned entries", "name a file that aiter, TunableOp, hipBLASLt or Triton wrote")
    rows = list(islice(tuner.rows(file), MOST_ENTRIES + 1))
    file.check(len(rows), MOST_ENTRIES, "it has more than {:,} entries")
    return tuner, rows


def tuned_of(
    problems: Sequence[Problem], tuner: Tuner, rows: Sequence[Mapping[str, str]]
) -> list[tuple[Problem, bool]]:
    """Return the problems that a tuner supports, each with True if one of the tuned entries in `rows` matches it."""
    entries_by_columns: dict[tuple[str, ...], set[tuple[str | None, ...]]] = {}
    answers = []
    for problem in problems:
        try:
            key = tuner.entry(problem).key
        except NotConverted:
            continue
        names = tuple(name for name in key if name == "B" or (rows and name in rows[0]))
        entries = entries_by_columns.setdefault(names, {tuple(row.get(name) for name in names) for row in rows})
        answers.append((problem, tuple(key[name] for name in names) in entries))
    return answers


SIZES = ("M", "N", "K")
# first columns by which files of fused mixtures of experts are recognized
MIXTURE = ("token", "model_dim", "inter_dim", "expert", "topk")
MOST_ROWS = 200_000
MOST_US = 1e9
# start of the names of files about quantized products; most of these files do not name the dtypes
QUANTIZED_NAME = re.compile(r"a\d+w\d+")
NO_DTYPE = "dtypes of tensors: the file has none, so they are bfloat16"


def recognizes(head: Head) -> bool:
    line = head.start.partition(b"\n")[0].decode(errors="replace")
    columns = _cells(line) if not line.lstrip().startswith(("{", "[")) else ()  # JSON lines
    return set(columns) >= set(SIZES) or set(columns) >= set(MIXTURE)


def read(file: ForeignFile) -> Iterator[Record]:
    header = next(file.lines(), "")
    if not recognizes(Head(file.path, "", header.encode())):
        raise file.damage("its first line does not name the columns M, N and K")
    is_timed = "us" in _cells(header)
    if is_timed:
        file.losses.defaults[:] = [text for text in file.losses.defaults if text != NO_TIMES]
    builder = RecordBuilder("aiter", file.losses, is_timed=is_timed)
    for number, row in enumerate(_csv_rows(file), 1):
        file.check(number, MOST_ROWS, "it has more than {:,} rows")
        try:
            op, args, kwargs = _call(row, file)
            duration_ns = _duration_ns(row["us"]) if is_timed else 0
        except (ValueError, KeyError) as error:
            reason = f"a row has no column {error}" if isinstance(error, KeyError) else str(error)
            file.losses.skip("fused_moe" if "token" in row else "gemm", reason)
            continue
        builder.add_call(op, args, kwargs, duration_ns=duration_ns, device_ns=duration_ns if is_timed else -1)
        yield from builder.ready()
    yield from builder.end()


def _call(row: Mapping[str, str], file: ForeignFile) -> tuple[str, list[Any], dict[str, Any]]:
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
    # the result has another dtype than the matrices
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
