"""The corpus rows of one trace: its signatures, how often each is called, and the time of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import pandas as pd

from opgrip.errors import shortened
from opgrip.traces.analysis.differences.side import call_outline
from opgrip.traces.codec.record_forms import key_of_case
from opgrip.traces.schema.arguments import TensorSpec, tensors
from opgrip.traces.schema.records import Signature
from opgrip.traces.schema.tensor_specs import plain_name
from opgrip.traces.table.trace import Trace

MOST_SHAPES = 120
"""maximum length of the shapes column in characters"""
MOST_ELEMENTS = (1 << 63) - 1
"""maximum element count, because a shape in an untrusted file can contain any number"""


def rows_of(trace: Trace) -> pd.DataFrame:
    """Return one row per signature of the trace's own calls, with the columns described in `Corpus`.

    Each call counts with the median time of its signature, as in `Trace.summary`.
    """
    calls = trace.own_calls
    groups = calls.groupby("signature")
    counts, medians = groups.size(), groups["time_ns"].median()
    contexts = contexts_of(trace)
    rows = [
        {
            "signature": signature.number,
            **signature_facts(signature, contexts.get(signature.number, {})),
            "count": int(counts[signature.number]),
            "median_us": float(medians[signature.number]) / 1e3,
        }
        for signature in trace.signatures
        if signature.number in counts.index
    ]
    table = pd.DataFrame(rows, columns=COLUMNS)
    table["time_us"] = table["count"] * table["median_us"]
    table["call_share"] = table["count"] / max(float(table["count"].sum()), 1.0)
    # without times, every call has the same weight
    has_times = bool(table["time_us"].any())
    table["share"] = table["time_us"] / float(table["time_us"].sum()) if has_times else table["call_share"]
    return table


COLUMNS = (
    *("signature", "key", "kind", "op", "call", "shapes", "dtypes", "device", "elements", "count", "median_us"),
    *("time_us", "call_share", "share"),
)


def written_from(frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Return, for each key, the row of the trace that spends most time on it."""
    rows = frame[frame["key"].isin(list(keys))]
    return rows.sort_values("time_us", ascending=False, kind="stable").drop_duplicates("key")


def contexts_of(trace: Trace) -> dict[int, Mapping[str, Any]]:
    """Return the settings of most calls of each signature, by signature number."""
    context_of = {scope.number: scope.context or 0 for scope in trace.scopes}
    calls = trace.own_calls
    pairs = pd.DataFrame({"signature": calls["signature"], "context": calls["scope"].map(context_of)}).dropna()
    sizes = pairs.groupby(["signature", "context"], sort=False).size()
    most = sizes.sort_values(ascending=False, kind="stable").reset_index().drop_duplicates("signature")
    numbers = zip(most["signature"].tolist(), most["context"].tolist(), strict=True)
    return {int(signature): trace.contexts.get(int(context), {}) for signature, context in numbers}


def signature_facts(signature: Signature, context: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cells of a row that depend only on the signature and the settings of most of its calls."""
    specs = list(tensors([signature.args, signature.kwargs]))
    return {
        "key": key_of_case(signature, context),
        "kind": signature.kind,
        "op": signature.op,
        "call": call_outline(signature),
        "shapes": shapes_text(specs),
        "dtypes": ",".join(dict.fromkeys(plain_name(spec.dtype) for spec in specs)),
        "device": next(iter(dict.fromkeys(spec.device for spec in specs)), ""),
        "elements": min(max((prod(spec.shape) for spec in specs), default=0), MOST_ELEMENTS),
    }


def shapes_text(specs: list[TensorSpec]) -> str:
    """Return the shapes of tensors in short form: `[2,3] [3]`."""
    return shortened(" ".join(f"[{','.join(map(str, spec.shape))}]" for spec in specs), MOST_SHAPES)
