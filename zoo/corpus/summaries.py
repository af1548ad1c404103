"""Summary tables of a corpus: by operator, model or signature, and the coverage of torch's operators."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd

from opgrip.capture.models.operators.torch_tables import is_composite, is_public, name_of, registered_operators
from opgrip.cli.command import counted, printable
from opgrip.cli.output_files import csv_text, whole_file, write_parquet_table
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
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
    """

    by: str
    table: pd.DataFrame
    models: Mapping[str, int]

    @property
    def tells_models(self) -> bool:
        return self.by in (OP, SHAPE, DTYPE, SIGNATURE, FAMILY)

    def of_models(self, least: int, most: int | None) -> Summary:
        counts = self.table["models"]
        flags = counts >= self.table["source"].map(self.models) if least == ALL else counts >= least
        return replace(self, table=self.table[flags if most is None else flags & (counts <= most)])

    def common(self, source: str) -> pd.DataFrame:
        return self._of(source, self.models[source])

    def unique(self, source: str) -> pd.DataFrame:
        return self._of(source, 1)

    def _of(self, source: str, models: int) -> pd.DataFrame:
        return self.table[(self.table["source"] == source) & (self.table["models"] == models)]


def summarize(corpus: Corpus, by: str = OP) -> Summary:
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
    frame = frame.assign(weighted=frame["call_share"] * frame["weight"])
    rows = {key: _distribution(own) for key, own in frame.groupby(["source", "op"], sort=False)}
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.index = pd.MultiIndex.from_tuples(table.index, names=["source", "op"])
    return table


def _distribution(own: pd.DataFrame) -> dict[str, object]:
    order = own.sort_values("elements")
    reached = order["weighted"].cumsum().to_numpy()
    elements = order["elements"].to_numpy()
    indices = np.searchsorted(reached, [share * reached[-1] for share in QUANTILES.values()])
    quantiles = [int(elements[min(index, len(elements) - 1)]) for index in indices]
    return {
        **dict(zip(QUANTILES, quantiles, strict=True)),
        "shapes": own["shapes"].nunique(),
        "usual_shapes": usual(own, "shapes"),
        "usual_dtypes": usual(own, "dtypes"),
    }


def usual(own: pd.DataFrame, column: str) -> str:
    sums = own.groupby(column)["weighted"].sum().sort_values(ascending=False, kind="stable")
    whole = float(sums.sum()) or 1.0
    words = [f"{str(name) or '-'} {share / whole:.0%}" for name, share in sums.head(USUAL).items()]
    return "; ".join([*words, *([counted(len(sums) - USUAL, "other")] if len(sums) > USUAL else [])])


def _own_operators(frame: pd.DataFrame) -> pd.DataFrame:
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
    """Return the category of an operator, such as `activation` for `aten.relu`."""
    packet = name.partition(".")[2]
    if _VENDORS.match(packet):
        return VENDOR
    if packet.endswith("_copy") and packet != "index_copy":
        return COPY
    return family_of(name if ":" in name else f"{name}.default")


def public_operators() -> set[str]:
    """Return the names of torch's operators that a program can call and that traces record, such as `aten.add`."""
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
    namespace, _, rest = name.partition(".")
    packet = rest.partition(".")[0]
    return f"{namespace}.{packet.rstrip('_') or packet}" if rest else name


def cover(corpus: Corpus) -> pd.DataFrame:
    """Return a table of torch's and the corpus's operators, to see which of torch's operators the corpus contains."""
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
    public = table[table["is_public"]]
    groups = public.groupby("category")
    summary = pd.DataFrame({"operators": groups.size(), "covered": groups["is_covered"].sum()})
    summary["share"] = summary["covered"] / summary["operators"]
    missing = public[~public["is_covered"]].groupby("category")["op"]
    names = missing.agg(lambda names: ", ".join(name.partition(".")[2] for name in names))
    summary["missing"] = names.reindex(summary.index).fillna("")
    return summary.sort_values(["operators"], ascending=False).reset_index()


def print_coverage(table: pd.DataFrame, file: IO[str]) -> None:
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


WRITTEN = (".json", ".csv", ".md", ".parquet")


def check_form(path: Path) -> None:
    if path.suffix not in WRITTEN:
        raise UserError(
            f"{path} is not the name of a {', '.join(WRITTEN[:-1])} or {WRITTEN[-1]} file",
            "choose a name with one of these suffixes",
        )


def write_summary(corpus: Corpus, summary: Summary, path: Path, force: bool) -> None:
    write_table(summary.table, path, force, facts_of(corpus, summary))


def write_table(table: pd.DataFrame, path: Path, force: bool, facts: Mapping[str, Any]) -> None:
    check_form(path)
    with whole_file(path, force) as file:
        if path.suffix == ".parquet":
            write_parquet_table(table, file)
        elif path.suffix == ".csv":
            text = csv_text(map(str, table.columns), (row.values() for row in records(table)))
            file.write(text.encode(errors="backslashreplace"))
        elif path.suffix == ".md":
            file.writelines(f"{line}\n".encode(errors="backslashreplace") for line in _markdown(table))
        else:
            form = {**facts, "rows": records(table)}
            file.write(json.dumps(form, indent=1, allow_nan=False).encode() + b"\n")


def facts_of(corpus: Corpus, summary: Summary | None = None) -> dict[str, Any]:
    members = [
        {name: getattr(member, name) for name in ("name", "source", "model", "run", "library", "family")}
        for member in corpus.members
    ]
    form: dict[str, Any] = {"traces": members, "notes": list(corpus.notes)}
    if summary is None:
        return form
    form |= {"by": summary.by, "models": dict(summary.models)}
    if summary.tells_models:
        form["common"] = {source: len(summary.common(source)) for source in summary.models}
        form["unique"] = {source: len(summary.unique(source)) for source in summary.models}
    return form


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    plain = table.astype(object).where(table.notna(), None)
    return [{str(name): cell for name, cell in row.items()} for row in plain.to_dict("records")]


def _markdown(table: pd.DataFrame) -> Iterator[str]:
    yield f"| {' | '.join(map(str, table.columns))} |"
    is_number = [pd.api.types.is_numeric_dtype(table[name]) for name in table.columns]
    yield f"| {' | '.join('---:' if number else '---' for number in is_number)} |"
    for row in records(table):
        yield f"| {' | '.join(_cell(str(name), cell) for name, cell in row.items())} |"


def _cell(name: str, cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:.2%}" if name.endswith("share") else f"{cell:,.1f}"
    if isinstance(cell, int):
        return f"{cell:,}"
    return "" if cell is None else printable(cell).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")


NUMBERS = {
    "share": TableColumn("share", "share", ".2%"),
    "models": TableColumn("models", "models", ",d"),
    "traces": TableColumn("traces", "traces", ",d", rank=2),
    "count": TableColumn("calls", "count", ",d", rank=1),
    "calls": TableColumn("calls", "calls", ",d", rank=1),
    "operators": TableColumn("operators", "operators", ",d", rank=1),
    "signatures": TableColumn("signatures", "signatures", ",d", rank=1),
    "own_operators": TableColumn("own operators", "own_operators", ",d", rank=1),
    "alike": TableColumn("alike", "alike", ".2%", rank=1),
    "median_us": TableColumn("median us", lambda row: row.median_us or None, ",.1f", rank=2),
    "time_us": TableColumn("ms", lambda row: row.time_us / 1e3 if row.time_us else None, ",.1f", rank=3),
    "elements_p10": TableColumn("p10 elements", lambda row: int(row.elements_p10), ",d", rank=4),
    "elements_p50": TableColumn("median elements", lambda row: int(row.elements_p50), ",d", rank=3),
    "elements_p90": TableColumn("p90 elements", lambda row: int(row.elements_p90), ",d", rank=4),
}
# text columns by their name in the table; they follow the columns of numbers
TEXTS = {
    "op": TableColumn("operator", "op", least=24),
    "call": TableColumn("call", "call", least=24),
    "trace": TableColumn("trace", "trace", least=24),
    "model": TableColumn("model", "model", least=24),
    "family": TableColumn("family", "family", least=24),
    "dtypes": TableColumn("dtypes", "dtypes", least=24),
    "shapes": TableColumn("shapes", "shapes", least=24),
    "usual_dtypes": TableColumn("usual dtypes", "usual_dtypes", least=24, rank=3),
    "usual_shapes": TableColumn("usual shapes", "usual_shapes", below=True),
}


def print_summary(corpus: Corpus, summary: Summary, top: int, file: IO[str]) -> None:
    for source in corpus.sources:
        own = corpus.of_source(source)
        table = summary.table[summary.table["source"] == source]
        _print_totals(own, source, file)
        if summary.tells_models and summary.models[source] > 1:
            common, alone = len(summary.common(source)), len(summary.unique(source))
            print_line(f"of {len(table):,} rows, {common:,} occur in all models, {alone:,} in only one", file)
        print()
        rows = list(table.head(top).itertuples())
        print_table(columns_of(table), rows, file, f"by {summary.by} ({len(table):,} in total)")


def _print_totals(corpus: Corpus, source: str, file: IO[str]) -> None:
    frame = corpus.frame
    words = [
        counted(frame["model"].nunique(), "model"),
        counted(len(corpus.members), "trace"),
        counted(int(frame["count"].sum()), "call"),
        counted(frame["key"].nunique(), "signature"),
        counted(frame["op"].nunique(), "operator"),
    ]
    print_line(f"{source}: {', '.join(words)}", file)


def columns_of(table: pd.DataFrame) -> list[TableColumn]:
    is_number = {name: pd.api.types.is_numeric_dtype(table[name]) for name in table}
    columns = [column for name, column in NUMBERS.items() if is_number.get(name)]
    # a call begins with its operator
    texts = {name: column for name, column in TEXTS.items() if not (name == "op" and "call" in table)}
    return columns + [column for name, column in texts.items() if is_number.get(name) is False]
