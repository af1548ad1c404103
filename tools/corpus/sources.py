"""What the traces of a corpus have that another tool's files lack, operator by operator, and the other way round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.capture.models.operators.registered import is_composite
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.tools.corpus.coverage import plain_operator
from opgrip.traces.corpus import Corpus
from opgrip.traces.schema.arguments import TensorSpec, map_leaves
from opgrip.traces.schema.records import Signature
from opgrip.traces.table.trace import load

BOTH = "all"


def compare_sources(corpus: Corpus, unbounded: bool = False) -> pd.DataFrame:
    """One row an operator: op, has_it (`all`, or the sources that have it), and by source models, signatures, share.

    Overloads of a name are one operator, and so are variants that write into an argument. An operator that is nothing
    but calls of others (`aten.conv2d`) counts as what it calls (`aten.convolution`), since it stands in no trace of
    ours; the column `by_way_of` names it. One that calls several counts for each of them.
    """
    stands_for = _stands_for(corpus, unbounded)
    frame = corpus.frame[["source", "model", "op", "key", "share", "weight"]]
    frame = frame.assign(plain=frame["op"].map(stands_for)).explode("plain")
    frame = frame.assign(written=frame["op"].map(plain_operator), weighted=frame["share"] * frame["weight"])
    groups = frame.groupby(["plain", "source"])
    counts = pd.DataFrame(
        {
            "models": groups["model"].nunique(),
            "signatures": groups["key"].nunique(),
            "share": groups["weighted"].sum(),
        }
    ).unstack("source", fill_value=0)
    table = pd.DataFrame({"op": counts.index})
    present = pd.DataFrame(counts["signatures"]).gt(0)
    names = [str(source) for source in present.columns]
    rows: list[list[bool]] = present.to_numpy().tolist()
    table["has_it"] = [
        BOTH if all(row) else ",".join(source for source, has in zip(names, row, strict=True) if has) for row in rows
    ]
    for source in corpus.sources:
        for column in ("models", "signatures", "share"):
            table[f"{source}_{column}"] = counts[column][source].to_numpy()
    others = frame[frame["written"] != frame["plain"]].groupby("plain")["written"].unique()
    table["by_way_of"] = table["op"].map(others.map(lambda names: ", ".join(sorted(names)))).fillna("")
    shares = [f"{source}_share" for source in corpus.sources]
    return table.sort_values(shares, ascending=False, kind="stable", ignore_index=True)


def describe_sources(table: pd.DataFrame) -> str:
    """How many operators all sources have, and how many some of them."""
    counts = table["has_it"].value_counts()
    words = [f"{int(counts.get(BOTH, 0)):,} of {len(table):,} operators are in all sources"]
    words += [f"{int(count):,} in {name} alone" for name, count in counts.items() if name != BOTH]
    return ", ".join(words)


def _stands_for(corpus: Corpus, unbounded: bool) -> dict[str, list[str]]:
    """By operator, what it counts as."""
    names = corpus.frame["op"].unique()
    stands_for = {name: [plain_operator(name)] for name in names}
    first = corpus.frame.drop_duplicates("op")
    for trace, rows in first[first["op"].map(_is_composite)].groupby("trace"):
        numbers = set(rows["signature"].tolist())
        signatures = load(corpus.path_of(str(trace)), True, unbounded).signatures
        for signature in signatures:
            if signature.number in numbers and (parts := _parts_of(signature)):
                stands_for[signature.op] = list(dict.fromkeys(map(plain_operator, parts)))
    return stands_for


def _is_composite(name: str) -> bool:
    function = _function(Signature(0, "operator", name, (), {}))
    return function is not None and is_composite(function)


def _function(signature: Signature) -> Any:
    try:
        function = find_operator(signature).function
    except Unsupported:
        return None
    return function if isinstance(function, torch._ops.OpOverload) else None


def _parts_of(signature: Signature) -> list[str]:
    """What a composite operator calls, found with tensors that have no memory; empty where it does not run so."""
    function = _function(signature)
    listing = _Listing()
    try:
        # a stranger's shapes need not be any
        args, kwargs = map_leaves(_without_memory, (signature.args, signature.kwargs))
        with listing:
            function(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return []
    return list(listing.names)


def _without_memory(leaf: Any) -> Any:
    if isinstance(leaf, TensorSpec):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


class _Listing(TorchDispatchMode):
    """Notes what is called of torch's operators."""

    names: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
