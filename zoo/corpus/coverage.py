"""Which of torch's public operators a corpus has, and the table of it."""

from __future__ import annotations

import re
from typing import IO

import pandas as pd

from opgrip.capture.models.operators.registered import is_composite, is_public, name_of, registered_operators
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.replay.operators.lookup import family_of
from opgrip.zoo.corpus import Corpus

VENDOR, COPY = "vendor's library", "copy of a view"
_VENDORS = re.compile(r"(cudnn|miopen|mkldnn|mps|fbgemm|xnnpack)_")


def category_of(name: str) -> str:
    """What kind of work an operator does: `aten.relu` is an activation.

    Operators of one vendor's library and variants of views that copy are kinds of their own, since programs do not call
    them by name.
    """
    packet = name.partition(".")[2]
    if _VENDORS.match(packet):
        return VENDOR
    if packet.endswith("_copy") and packet != "index_copy":
        return COPY
    return family_of(name if ":" in name else f"{name}.default")


def public_operators() -> set[str]:
    """Names of torch's operators that programs call and that stand in traces: `aten.add`.

    All overloads of a name are one operator, and so is its variant that writes into its argument. Operators that are
    nothing but calls of others are none.
    """
    functions = [
        function
        for function in registered_operators()
        if is_public(function)
        and not is_composite(function)
        and not any(argument.is_out for argument in function._schema.arguments)
    ]
    names = {name_of(function).rpartition(".")[0] for function in functions}
    return {plain_operator(name) for name in names}


def plain_operator(name: str) -> str:
    """An operator without what tells its variants apart: `aten.add` of `aten.add_.Tensor` and of `aten.add_`."""
    namespace, _, rest = name.partition(".")
    packet = rest.partition(".")[0]
    return f"{namespace}.{packet.rstrip('_') or packet}" if rest else name


def cover(corpus: Corpus) -> pd.DataFrame:
    """One row an operator of torch: op, category, is_covered, then for each source models and signatures.

    Below them, operators of the corpus that are no public ones of torch: those of other packages, and torch's own.
    """
    frame = corpus.frame.assign(plain=corpus.frame["op"].map(plain_operator))
    public = public_operators()
    names = sorted(public) + sorted(set(frame["plain"]) - public)
    table = pd.DataFrame({"op": names})
    table["category"] = list(map(category_of, names))
    table["is_public"] = table["op"].isin(public)
    table["is_covered"] = table["op"].isin(set(frame["plain"]))
    for source in corpus.sources:
        groups = frame[frame["source"] == source].groupby("plain")
        for column, counts in (("models", groups["model"].nunique()), ("signatures", groups["key"].nunique())):
            table[f"{source}_{column}"] = table["op"].map(counts).fillna(0).astype(int)
    return table


def summarize_coverage(table: pd.DataFrame) -> pd.DataFrame:
    """One row a category: category, operators (of torch), covered, share (of them), missing (their names)."""
    public = table[table["is_public"]]
    groups = public.groupby("category")
    summary = pd.DataFrame({"operators": groups.size(), "covered": groups["is_covered"].sum()})
    summary["share"] = summary["covered"] / summary["operators"]
    missing = public[~public["is_covered"]].groupby("category")["op"]
    names = missing.agg(lambda names: ", ".join(name.partition(".")[2] for name in names))
    summary["missing"] = names.reindex(summary.index).fillna("")
    return summary.sort_values(["operators"], ascending=False).reset_index()


def print_coverage(table: pd.DataFrame, file: IO[str]) -> None:
    """Print how many operators of each category the corpus has, and which it lacks."""
    public = table[table["is_public"]]
    covered = int(public["is_covered"].sum())
    others = int((~table["is_public"]).sum())
    print_line(
        f"{covered:,} of {len(public):,} public operators of torch are in the corpus, and {others:,} others", file
    )
    print()
    rows = list(summarize_coverage(table).itertuples())
    print_table(COLUMNS, rows, file, "by category")


COLUMNS = (
    TableColumn("operators", "operators", ",d", rank=1),
    TableColumn("covered", "covered", ",d", rank=1),
    TableColumn("share", "share", ".2%"),
    TableColumn("category", "category", most=200),
    TableColumn("missing", "missing", below=True, most=2000),
)
