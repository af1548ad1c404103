"""What a replay gives: one row a case and mode."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd

from opgrip.traces.arguments import Opaque, TensorSpec, leaves
from opgrip.traces.errors import UserError
from opgrip.traces.records import Signature

OK, UNSUPPORTED, FAILED, SKIPPED = "ok", "unsupported", "failed", "skipped"


@dataclass(frozen=True, slots=True)
class Result:
    """A case's measurement, or why there is none.

    Attributes
    ----------
    case : the signature's number in the trace
    shapes : of the arguments, in short
    count : calls in the program; `share` is that of their time in all selected calls' time, 0 to 1
    status : `ok`, `unsupported`, `failed`, `skipped`
    median_us, p10_us, p90_us : of the timed runs, of which there are `samples`
    captured_us : median duration in the program; `captured_total_us` is the sum over its calls
    outputs_match : whether shapes and dtypes of the outputs are the recorded ones; None where they are not known
    flops, bytes : of one call; flops where torch has a formula
    error : the reason of a status that is not ok
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
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    samples: int = 0
    outputs_match: bool | None = None
    flops: int | None = None
    bytes: int | None = None
    error: str | None = None


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


def summarize(results: list[Result]) -> str:
    """How many cases came to which status, in one line."""
    counts: dict[str, int] = {}
    for result in results:
        counts[result.status] = counts.get(result.status, 0) + 1
    parts = [f"{count} {status}" for status, count in sorted(counts.items(), key=lambda item: item[0] != OK)]
    return f"{len(results)} cases: {', '.join(parts)}"


def describe_shapes(signature: Signature) -> str:
    """Dtypes and shapes of a call's arguments in short: `float32[64,256] [1,1] False dim=0`."""
    named = (f"{name}={_describe(value)}" for name, value in signature.kwargs.items())
    return " ".join([*map(_describe, signature.args), *named])


def same_outputs(recorded: Any, described: Any) -> bool | None:
    """Whether two trees of outputs have tensors of the same shapes and dtypes at the same places.

    None where the recorded ones are not known.
    """
    if any(isinstance(leaf, Opaque) for leaf in leaves(recorded)):
        return None
    return [_outline(leaf) for leaf in leaves(recorded)] == [_outline(leaf) for leaf in leaves(described)]


def _describe(value: object) -> str:
    if isinstance(value, TensorSpec):
        return f"{_short(value.dtype)}[{','.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_describe, value))}]"
    return _short(value)


def _short(value: object) -> str:
    return str(value).removeprefix("torch.")


def _outline(leaf: object) -> object:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, TensorSpec) else None
