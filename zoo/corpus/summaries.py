"""Summary tables of a corpus: by operator, model or signature, and the coverage of torch's operators."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO

import numpy as np
import pandas as pd

from opgrip.capture.models.operators.torch_tables import is_composite, is_public, name_of, registered_operators
from opgrip.cli.command import counted
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.replay.operators.lookup import family_of
from opgrip.zoo.corpus.corpus import Corpus

OP, SHAPE, DTYPE, MODEL, FAMILY, SIGNATURE, ROW = "op", "shape", "dtype", "model", "family", "signature", "row"
# columns that identify a row, for each kind of row
BY: Mapping[str, Sequence[str]] = {
    OP: ("op",),
    SHAPE: ("op", "shapes"),
    DTYPE: ("dtypes",),
    MODEL: ("model",),
    FAMILY: ("family",),
    SIGNATURE: ("key",),
    ROW: ("trace", "signature"),
}
USUAL = 3  # number of shapes and dtypes that are listed for an operator, most frequent first
ALL = -1  # lower limit that means the number of all models of a source
QUANTILES = {"elements_p10": 0.1, "elements_p50": 0.5, "elements_p90": 0.9}


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary table of a corpus.

    by : the kind of row, a key of `BY` such as `op`
    table : one row per source and value of the columns `BY[by]`, sorted by falling share within each source.
        All tables have the columns source, the columns of `BY[by]`, models and traces (how many of them have such
        calls), calls (number of calls), signatures (number of distinct signatures), time_us and share (share of the
        source's time: each model of a source has the same weight, and the shares of a source sum to 1).
        A table by operator also has quantiles of the number of elements of a call's largest tensor, and the most
        frequent shapes and dtypes, with the same weight for each trace.
        A table by model also has `operators` (number of operators that the model calls), `own_operators` (number of
        them that no other model calls) and `alike` (share of its signatures that other models have too).
    models : number of models of each source
    """

    by: str
    table: pd.DataFrame
    models: Mapping[str, int]

    @property
    def tells_models(self) -> bool:
        """Return True if the calls of a row can come from several models, so that the number of models is worth
        showing.
        """
        return self.by in (OP, SHAPE, DTYPE, SIGNATURE, FAMILY)

    def of_models(self, least: int, most: int | None) -> Summary:
        """Return the summary with only the rows whose calls occur in at least `least` and at most `most` models.

        least : lower limit; `ALL` for all models of the source
        most : upper limit; None for no limit
        """
        counts = self.table["models"]
        flags = counts >= self.table["source"].map(self.models) if least == ALL else counts >= least
        return replace(self, table=self.table[flags if most is None else flags & (counts <= most)])

    def common(self, source: str) -> pd.DataFrame:
        """Return the rows whose calls occur in all models of a source."""
        return self._of(source, self.models[source])

    def unique(self, source: str) -> pd.DataFrame:
        """Return the rows whose calls occur in only one model of a source."""
        return self._of(source, 1)

    def _of(self, source: str, models: int) -> pd.DataFrame:
        return self.table[(self.table["source"] == source) & (self.table["models"] == models)]


def summarize(corpus: Corpus, by: str = OP) -> Summary:
    """Return a summary table of a corpus with one row per operator, or per another key of `BY`."""
    frame = corpus.frame
    models = frame.groupby("source")["model"].nunique()
    counts = {str(source): int(count) for source, count in models.items()}
    if by == ROW:
        return Summary(by, frame, counts)
    keys = ["source", *BY[by]]
    frame = frame.assign(weighted=frame["share"] * frame["weight"])
    groups = frame.groupby(keys, sort=False)
    columns = {
        "models": groups["model"].nunique(),
        "traces": groups["trace"].nunique(),
        "calls": groups["count"].sum(),
        "signatures": groups["key"].nunique(),
        "time_us": groups["time_us"].sum(),
        "share": groups["weighted"].sum(),
    }
    if by == SIGNATURE:
        del columns["signatures"]
        columns = {"op": groups["op"].first(), "call": groups["call"].first(), **columns}
        columns["named"] = groups["model"].unique().map(lambda names: ", ".join(sorted(names)))
    if by in (SHAPE, DTYPE, MODEL, FAMILY):
        columns["operators"] = groups["op"].nunique()
    table = pd.DataFrame(columns)
    if by == OP:
        table = table.join(_shapes_of(frame))
        table["named"] = groups["model"].unique().map(lambda names: ", ".join(sorted(names)))
    if by == MODEL:
        table = table.join(_own_operators(frame)).drop(columns=["models"])
        for name in ("library", "family"):
            table[name] = groups[name].first()
    table = table.reset_index()
    place = table["source"].map({source: number for number, source in enumerate(corpus.sources)})
    order = table.assign(place=place).sort_values(
        ["place", "share", "calls"], ascending=[True, False, False], kind="stable"
    )
    return Summary(
        by,
        order.drop(columns="place").reset_index(drop=True),
        {str(name): int(count) for name, count in models.items()},
    )


def _shapes_of(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table by source and operator: quantiles of the number of elements of a call's largest tensor, and
    the most frequent shapes and dtypes.
    """
    frame = frame.assign(weighted=frame["call_share"] * frame["weight"])
    rows = {key: _distribution(own) for key, own in frame.groupby(["source", "op"], sort=False)}
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.index = pd.MultiIndex.from_tuples(table.index, names=["source", "op"])
    return table


def _distribution(own: pd.DataFrame) -> dict[str, object]:
    order = own.sort_values("elements")
    reached = order["weighted"].cumsum().to_numpy()
    elements = order["elements"].to_numpy()
    places = np.searchsorted(reached, [share * reached[-1] for share in QUANTILES.values()])
    quantiles = [int(elements[min(place, len(elements) - 1)]) for place in places]
    return {
        **dict(zip(QUANTILES, quantiles, strict=True)),
        "shapes": own["shapes"].nunique(),
        "usual_shapes": usual(own, "shapes"),
        "usual_dtypes": usual(own, "dtypes"),
    }


def usual(own: pd.DataFrame, column: str) -> str:
    """Return the most frequent values of a column with their shares, as a text such as `[2,3] 80%; [4] 20%`.

    own : rows of an operator, with their weight in the column `weighted`
    """
    sums = own.groupby(column)["weighted"].sum().sort_values(ascending=False, kind="stable")
    whole = float(sums.sum()) or 1.0
    words = [f"{str(name) or '-'} {share / whole:.0%}" for name, share in sums.head(USUAL).items()]
    return "; ".join([*words, *([counted(len(sums) - USUAL, "other")] if len(sums) > USUAL else [])])


def _own_operators(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table by source and model: number of operators that no other model calls (`own_operators`), and
    share of signatures that other models have too (`alike`).
    """
    pairs = frame[["source", "model", "op"]].drop_duplicates()
    alone = pairs.groupby(["source", "op"])["model"].transform("size") == 1
    keys = frame[["source", "model", "key"]].drop_duplicates()
    alike = keys.groupby(["source", "key"])["model"].transform("size") > 1
    groups = ["source", "model"]
    return pd.DataFrame(
        {
            "own_operators": alone.groupby([pairs[name] for name in groups]).sum(),
            "alike": alike.groupby([keys[name] for name in groups]).mean(),
        }
    )


VENDOR, COPY = "vendor's library", "copy of a view"
_VENDORS = re.compile(r"(cudnn|miopen|mkldnn|mps|fbgemm|xnnpack)_")


def category_of(name: str) -> str:
    """Return the category of an operator, such as `activation` for `aten.relu`.

    Operators of one vendor's library have a separate category, and so have variants of views that copy, because
    programs do not call them by name.
    """
    packet = name.partition(".")[2]
    if _VENDORS.match(packet):
        return VENDOR
    if packet.endswith("_copy") and packet != "index_copy":
        return COPY
    return family_of(name if ":" in name else f"{name}.default")


def public_operators() -> set[str]:
    """Return the names of torch's operators that a program can call and that traces record, such as `aten.add`.

    All overloads of a name count as one operator, and so does its in-place variant. Composite operators, which only
    call other operators, are left out.
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
    """Return the name of an operator without overload and in-place suffix: `aten.add` for `aten.add_.Tensor` and
    `aten.add_`.
    """
    namespace, _, rest = name.partition(".")
    packet = rest.partition(".")[0]
    return f"{namespace}.{packet.rstrip('_') or packet}" if rest else name


def cover(corpus: Corpus) -> pd.DataFrame:
    """Return a table with one row per operator of torch or of the corpus, to see which of torch's operators the corpus
    contains.

    Its columns are op, category, is_public (a program can call it), is_covered (the corpus contains it), and for each
    source the number of models and of signatures with the operator. Operators that are not public are internal
    operators of torch and operators of other packages.
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
    """Return a table with one row per category of torch's public operators.

    Its columns are category, operators (number of operators), covered (number of operators that the corpus contains),
    share (covered / operators) and missing (names of the operators that the corpus lacks).

    table : the table that `cover` returns
    """
    public = table[table["is_public"]]
    groups = public.groupby("category")
    summary = pd.DataFrame({"operators": groups.size(), "covered": groups["is_covered"].sum()})
    summary["share"] = summary["covered"] / summary["operators"]
    missing = public[~public["is_covered"]].groupby("category")["op"]
    names = missing.agg(lambda names: ", ".join(name.partition(".")[2] for name in names))
    summary["missing"] = names.reindex(summary.index).fillna("")
    return summary.sort_values(["operators"], ascending=False).reset_index()


def print_coverage(table: pd.DataFrame, file: IO[str]) -> None:
    """Print for each category of operators how many the corpus contains, and the names of the missing ones.

    table : the table that `cover` returns
    """
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
