"""Print the results of all models as a table for a terminal and for the docs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Outcome = dict[str, Any]
COLUMNS = ("library", "run", "tried", "run natively", "captured whole", "98 % of cases ok", "cases", "ok")

HEADER = """\
# Model coverage

This page shows on which models capture and replay were checked.
It is written by `python benchmarks/coverage.py --write docs/coverage.md`,
whose docstring describes the procedure: one config of each folder of mmdet and mmseg, and the architectures of
transformers in a small size; random weights, one step, one image of 160x160 if a model accepts it. In addition to
`make openmmlab`, lap, motmetrics, scikit-learn and fairscale were installed.

- *whole*: the capture has each operator as often as an independent mode counts it, and results and model are bit for
  bit the same as without a capture.
- *replayed*: the share of its cases that are ok.
- *why not*: the status of other cases, or the error with which a model fails without a capture; *audit* lists
  operators that torch's record functions count differently ([capture.md](capture.md#audit)).

If no config of a folder runs natively, the row shows the first that can be built. Models that are not listed have not
been tried yet.
"""
OLDER = """\

Rows with *first attempt* come from an earlier version of the script, which reported the first of several errors. Rows
whose reason is an argument of type UntypedStorage were tried before traces held storages.
"""


def is_native(outcome: Outcome) -> bool:
    """Return True if the model runs without opgrip."""
    return "native" in outcome


def is_whole(outcome: Outcome) -> bool:
    """Return True if the capture of the model's step is complete and did not change its results."""
    captured = outcome.get("captured")
    if captured is None:
        return False
    is_complete = not (captured["missing"] or captured["surplus"] or captured["dropped"])
    return is_complete and (captured["is_same"] or not outcome["counted"]["is_repeatable"])


def is_of_first_attempt(outcome: Outcome) -> bool:
    """Return True if the reason why a model did not run comes from an earlier version of this benchmark, which kept the
    first of several reasons and not the most informative one.
    """
    return outcome.get("failed") == "native" and outcome["library"] != "transformers" and "attempts" not in outcome


def print_summary(outcomes: Sequence[Outcome]) -> None:
    """Print a line for each library and run."""
    table = Table(*COLUMNS)
    for row in summary(outcomes):
        table.add_row(*map(str, row))
    Console().print(table)


def summary(outcomes: Sequence[Outcome], models: Mapping[str, int] | None = None) -> Iterator[tuple[object, ...]]:
    """Yield for each library and run the number of models that run, are captured completely, and replay.

    models : number of available models by library; None to leave it out
    """
    for library, run in dict.fromkeys((item["library"], item["run"]) for item in outcomes):
        items = [item for item in outcomes if (item["library"], item["run"]) == (library, run)]
        replayed = [item["replayed"] for item in items if "replayed" in item]
        cases, ok = (sum(item[name] for item in replayed) for name in ("cases", "ok"))
        native, whole = (sum(map(question, items)) for question in (is_native, is_whole))
        good = sum(item["ok"] >= 0.98 * item["cases"] for item in replayed)
        share = f"{100 * ok / cases:.2f} %" if cases else "-"
        tried = f"{len(items)} of {models[library]}" if models else len(items)
        yield library, run, tried, native, whole, good, f"{cases:,}", share


def page(outcomes: Sequence[Outcome], available: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of docs/coverage.md.

    outcomes : outcome of each model and run
    available : for each library its `version`, and the number of its `models`
    """
    versions = ", ".join(f"{library} {about['version']}" for library, about in available.items())
    lines = [HEADER]
    if any(map(is_of_first_attempt, outcomes)):
        lines += [OLDER]
    lines += [f"\n*tried* counts folders or architectures of {versions}.\n\n"]
    models = {library: about["models"] for library, about in available.items()}
    lines += _markdown(COLUMNS, summary(outcomes, models))
    for library in dict.fromkeys(item["library"] for item in outcomes):
        items = sorted(
            (item for item in outcomes if item["library"] == library), key=lambda item: (item["name"], item["run"])
        )
        lines += [f"\n## {library}\n\n"]
        rows = (_row(item) for item in items)
        lines += _markdown(("model", "run", "size", "calls", "whole", "replayed", "why not"), rows)
    return "".join(lines)


def _row(item: Outcome) -> tuple[object, ...]:
    captured, replayed = item.get("captured"), item.get("replayed")
    share = f"{replayed['ok']}/{replayed['cases']}" if replayed else "-"
    whole = "-" if captured is None else "yes" if is_whole(item) else "no"
    calls = f"{captured['calls']:,}" if captured else "-"
    size = " x ".join(filter(None, (item.get("batch_size") and str(item["batch_size"]), item["size"]))) or "-"
    return item["name"], item["run"], size, calls, whole, share, "; ".join(_reasons(item))


def _reasons(item: Outcome) -> Iterator[str]:
    if "failed" in item:
        when = ", first attempt" if is_of_first_attempt(item) else ""
        yield f"{item['failed']}{when}: {item['reason'][:160]}"
    captured = item.get("captured", {})
    for word in ("missing", "surplus"):
        if captured.get(word):
            yield f"{word} " + ", ".join(f"{op} {count}" for op, count in captured[word].items())
    if captured and not captured["is_same"]:
        yield "results differ" if item["counted"]["is_repeatable"] else "results differ from run to run by themselves"
    # results that are not reproducible also differ in the audited step
    audited = item.get("audited", {}) if item.get("counted", {}).get("is_repeatable") else {}
    if audited.get("unexplained"):
        yield "audit: " + ", ".join(audited["unexplained"])
    if audited.get("changed_by_modes"):
        yield f"under any dispatch mode torch takes another way: {', '.join(audited['changed_by_modes'])}"
    yield from (reason[:160] for reason in item.get("replayed", {}).get("reasons", {}))


def _markdown(names: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    cells = [names, ["---"] * len(names), *rows]
    return [f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |\n" for row in cells]
