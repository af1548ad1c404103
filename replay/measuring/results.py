"""What a replay gives: one row a case and mode."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from opgrip.replay.arguments.values import RECORDED
from opgrip.replay.cases.ways import FORWARD
from opgrip.traces.arguments import Opaque, TensorSpec, leaves, tensors
from opgrip.traces.errors import UserError
from opgrip.traces.names import plain_name, tensor_outline
from opgrip.traces.records import Signature
from opgrip.traces.tensor_specs import shape_of

OK, WRONG, UNSUPPORTED, FAILED, TIMEOUT, SKIPPED = "ok", "wrong", "unsupported", "failed", "timeout", "skipped"


@dataclass(frozen=True, slots=True)
class Result:
    """A case's measurement, or why there is none.

    Attributes
    ----------
    case : the signature's number in the trace
    shapes : of the arguments, in short
    count : calls in the program; `share` is that of their time in all selected calls' time, 0 to 1
    values : how tensors' values were drawn: `recorded`, `random`, `zeros`
    direction : `forward`, or `backward` for the gradients of a call
    mode : how it was run; `note` says in a word how that was made ready
    status : `ok`, `wrong`, `unsupported`, `failed`, `timeout`, `skipped`
    threads, batch_scale, streams : what it was run with: of an operator, None for as many as in the program; times
        the recorded batch; cases at once
    captured_us : median duration in the program; `captured_total_us` is the sum over its calls
    median_us, p10_us, p90_us : of the timed runs, of which there are `samples`
    spread : interquartile range of the runs, as a share of their median
    stopped : why there were no more runs: `precision`, `settled`, `budget`, `most`, `iterations`
    dropped : runs that were not kept, the processor being slowed down meanwhile
    noisy : whether the spread is so large that the median is doubtful
    method, cache : how the runs were timed, and what the caches held: `discrete`, `program`
    first_ms : what the first call took: tracing, compiling and loading
    ratio, ratio_p10, ratio_p90 : quantiles of the time over that of the reference mode, and in its own rows over that
        of the first way to draw values, run by run; None in the row that others are compared with
    overlap : of cases that run at once, their time one after another over their time at once
    max_abs, max_rel : largest differences of the results from those of the reference mode
    faithful : whether the outputs have the recorded shapes and dtypes; None where they are not known
    flops : floating-point operations of one call, where there is a formula
    bytes_in, bytes_out : of all tensors that a call takes and gives
    allocated_bytes, peak_bytes : memory that one call allocates, and the most that it holds of it at once
    nsys_us, nsys_own_us : median time of the runs that Nsight Systems saw, by its clock and by ours; of `nsys_runs`
    nsys_kernels : names of the kernels of a run and how many of each; `nsys_launches` is how many in all
    nsys_gpu_us, nsys_gap_us : time of a run's kernels on the GPU, and in which the GPU waited between them
    nsys_copies, nsys_copied_bytes : of a run, between host and device or within it
    ncu_kernels : as Nsight Compute saw them, and `ncu_launches` how many a run; `ncu_us` is their time in a run
    ncu_dram_bytes, ncu_l2_bytes : of a run, between the GPU and its memory, and through its L2 cache
    ncu_dram_share, ncu_l2_share, ncu_sm_share, ncu_tensor_share : of what the GPU could do at most in that time, 0 to 1
    ncu_occupancy : warps that were active, of those that there is room for, 0 to 1
    ncu_metrics : further ones that were asked for, as `name=value; ...`
    bytes_moved : that one call has to read and write at least; `math_dtype` is what it computes in
    operators : that one call runs, as torch dispatches them; None where they were not counted
    limit_us : the least time that this machine could take for one call; `of_limit` is that over the median
    bound : what makes the limit: `bandwidth`, `arithmetic`, `launch`, `interpreter`
    energy_mj : of a GPU for one run; `clock_mhz` its mean clock meanwhile, and `throttled` why that was not higher
    error : the reason of a status that is not ok, in one line; `detail` is all of it, where that is asked for
    """

    case: int
    op: str
    shapes: str
    count: int
    share: float
    mode: str
    device: str
    status: str
    captured_us: float
    captured_total_us: float
    values: str = RECORDED
    direction: str = FORWARD
    threads: int | None = None
    batch_scale: int = 1
    streams: int = 1
    note: str = ""
    first_ms: float | None = None
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    samples: int = 0
    spread: float | None = None
    stopped: str | None = None
    dropped: int = 0
    noisy: bool | None = None
    method: str | None = None
    cache: str | None = None
    ratio: float | None = None
    ratio_p10: float | None = None
    ratio_p90: float | None = None
    overlap: float | None = None
    max_abs: float | None = None
    max_rel: float | None = None
    faithful: bool | None = None
    flops: int | None = None
    bytes_in: int | None = None
    bytes_out: int | None = None
    allocated_bytes: int | None = None
    peak_bytes: int | None = None
    error: str | None = None
    detail: str | None = None
    nsys_us: float | None = None
    nsys_own_us: float | None = None
    nsys_runs: int | None = None
    nsys_kernels: str | None = None
    nsys_launches: float | None = None
    nsys_gpu_us: float | None = None
    nsys_gap_us: float | None = None
    nsys_copies: float | None = None
    nsys_copied_bytes: int | None = None
    ncu_kernels: str | None = None
    ncu_launches: float | None = None
    ncu_us: float | None = None
    ncu_dram_bytes: int | None = None
    ncu_l2_bytes: int | None = None
    ncu_dram_share: float | None = None
    ncu_l2_share: float | None = None
    ncu_sm_share: float | None = None
    ncu_tensor_share: float | None = None
    ncu_occupancy: float | None = None
    ncu_metrics: str | None = None
    bytes_moved: int | None = None
    math_dtype: str | None = None
    operators: int | None = None
    limit_us: float | None = None
    of_limit: float | None = None
    bound: str | None = None
    energy_mj: float | None = None
    clock_mhz: float | None = None
    throttled: str | None = None


def to_frame(results: Iterable[Result]) -> pd.DataFrame:
    """One row a result, one column a field."""
    names = [field.name for field in fields(Result)]
    return pd.DataFrame([asdict(result) for result in results], columns=names)


def load_results(path: str | Path) -> pd.DataFrame:
    """The rows that `opreplay -o` wrote to a `.json` or `.csv` file.

    Raises
    ------
    UserError : where the file is not there or is not of that kind
    """
    path = Path(path)
    try:
        if path.suffix == ".csv":
            return pd.read_csv(path)
        document = json.loads(path.read_text(encoding="utf-8"))
        return pd.DataFrame(document["results"])
    except OSError as error:
        raise UserError(f"{path} cannot be read", (error.strerror or str(error)).lower()) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} does not hold results of opreplay", "write some with opreplay -o results.json"
        ) from error


def read_results(path: Path) -> list[Result]:
    """The rows of a `.json` or `.csv` file that `opreplay -o` wrote.

    Raises
    ------
    UserError : where the file is not there or is not of that kind
    """
    table = load_results(path).astype(object)
    rows = table.where(table.notna(), None).to_dict("records")
    whole = {field.name for field in fields(Result) if field.type in ("int", "int | None")}

    def value(name: str, cell: Any) -> Any:
        return int(cell) if name in whole and cell is not None else cell

    try:
        return [Result(**{str(name): value(str(name), cell) for name, cell in row.items()}) for row in rows]
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} has other columns than this opreplay writes", "choose another file") from error


def summarize(results: list[Result]) -> str:
    """How many cases came to which status, in one line."""
    counts: dict[str, int] = {}
    for result in results:
        counts[result.status] = counts.get(result.status, 0) + 1
    parts = [f"{count} {status}" for status, count in sorted(counts.items(), key=lambda item: item[0] != OK)]
    cases = len({result.case for result in results})
    rows = "" if cases == len(results) else f" in {len(results)} rows"
    return f"{cases} cases{rows}: {', '.join(parts)}"


def not_run(results: Iterable[Result]) -> set[int]:
    """The cases of which no row is ok."""
    rows = list(results)
    return {row.case for row in rows} - {row.case for row in rows if row.status == OK}


def describe_shapes(signature: Signature) -> str:
    """Dtypes and shapes of a call's arguments in short: `float32[64,256] [1,1] False dim=0`."""
    named = (f"{name}={_describe(value)}" for name, value in signature.kwargs.items())
    return " ".join([*map(_describe, signature.args), *named])


def same_outputs(recorded: Any, outputs: Sequence[Any], dtypes: bool = True) -> bool | None:
    """Whether the tensors among outputs have the shapes and dtypes of those that were recorded.

    None where the recorded ones are not known.

    Parameters
    ----------
    dtypes : else shapes alone
    """
    if any(isinstance(leaf, Opaque) for leaf in leaves(recorded)):
        return None
    expected = [(spec.shape, spec.dtype if dtypes else None) for spec in tensors(recorded)]
    actual = (tensor for tensor in outputs if isinstance(tensor, torch.Tensor))
    return expected == [(shape_of(tensor), tensor.dtype if dtypes else None) for tensor in actual]


def _describe(value: object) -> str:
    if isinstance(value, TensorSpec):
        return tensor_outline(value.dtype, value.shape)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_describe, value))}]"
    return _short(value)


def _short(value: object) -> str:
    text = plain_name(value)
    # of an object that tells where it is, or all that it consists of
    return type(value).__name__ if " at 0x" in text or "\n" in text or isinstance(value, Mapping) else text
