"""What a page is told of a corpus: a table for each way to look at it."""

from __future__ import annotations

from typing import Any

import pandas as pd

from opgrip.zoo.corpus import Corpus, summarize
from opgrip.zoo.corpus.corpus_table import records
from opgrip.zoo.corpus.coverage import cover, summarize_coverage

TABLES = ("op", "shape", "dtype", "signature", "model", "family")
COVERAGE = "coverage"
"""A table more: which of torch's public operators the corpus has."""
MOST_ROWS = 5_000
"""Of a table: those with the largest share of time."""
MEANINGS = {
    "source": "traces of ours, or the tool whose files these are",
    "op": "the operator",
    "call": "the operator and its arguments",
    "models": "that have such calls",
    "traces": "that have such calls",
    "calls": "in all traces",
    "signatures": "different ones: operator, shapes, strides, dtypes, scalars and settings",
    "operators": "different ones",
    "share": "of the time, in percent; each model of a source counts alike",
    "time_us": "of all calls, by the median of their signature",
    "own_operators": "operators that no other model calls",
    "alike": "part of its signatures that another model has too",
    "elements_p10": "elements of a call's largest tensor, the tenth percentile",
    "elements_p50": "their median",
    "elements_p90": "the ninetieth percentile",
    "usual_shapes": "those of most calls",
    "usual_dtypes": "those of most calls",
    "named": "the models",
    "category": "what kind of work the operators do",
    "of_torch": "public operators of torch of the kind",
    "covered": "those of them that the corpus has",
    "part_covered": "the part of them, in percent",
    "missing": "the others",
}

Plain = dict[str, Any]


def describe_corpus(corpus: Corpus) -> Plain:
    """All tables of a corpus."""
    members = [[member.name, member.source, member.model, member.run, member.library] for member in corpus.members]
    tables = {by: _table(_in_percent(summarize(corpus, by).table, "share")) for by in TABLES}
    coverage = summarize_coverage(cover(corpus)).rename(columns={"operators": "of_torch", "share": "part_covered"})
    return {"members": members, "tables": {**tables, COVERAGE: _table(_in_percent(coverage, "part_covered"))}}


def _in_percent(table: pd.DataFrame, column: str) -> pd.DataFrame:
    return table.assign(**{column: table[column] * 100})


def _table(table: pd.DataFrame) -> Plain:
    shown = table.drop(columns="key", errors="ignore").head(MOST_ROWS)
    rows = [[_plain(cell) for cell in row.values()] for row in records(shown)]
    columns = [
        {
            "name": name,
            "meaning": MEANINGS.get(str(name), str(name)),
            "is_number": bool(pd.api.types.is_numeric_dtype(shown[name])),
        }
        for name in shown.columns
    ]
    return {"columns": columns, "rows": rows, "left_out": len(table) - len(shown)}


def _plain(cell: Any) -> Any:
    if isinstance(cell, str):
        # a browser takes no halves of characters
        return cell.encode("utf-8", "backslashreplace").decode()
    return float(f"{cell:.6g}") if isinstance(cell, float) else cell
