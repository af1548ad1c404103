"""A comparison in words: what differs, what came of it, and in how many cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from opgrip.cli.plural import counted
from opgrip.replay.compare.comparison import UNREADABLE, Comparison, Total
from opgrip.replay.compare.verdicts import CONFIDENCE, Verdict, interval_text


def origin(header: Mapping[str, Any]) -> str:
    """Where a run comes from, in a line."""
    environment = header.get("environment", {})
    parts = (
        header.get("trace"),
        environment.get("machine"),
        header.get("device"),
        f"torch {header['torch']}" if "torch" in header else None,
        header.get("time"),
    )
    return ", ".join(str(part) for part in parts if part) or "a file that does not say"


def summary(comparison: Comparison) -> str:
    """How many cases came to which verdict."""
    counts = [f"{comparison.counts[verdict]:,} {verdict.value}" for verdict in Verdict if comparison.counts[verdict]]
    others = {
        "no longer ok": comparison.broken,
        "with other results": comparison.changed,
        "not timed": comparison.untimed,
        "missing": comparison.missing,
        "ok again": comparison.mended,
        "new": comparison.added,
    }
    counts += [f"{len(rows):,} {word}" for word, rows in others.items() if rows]
    return f"{counted(len(comparison.pairs), 'case')} timed in both: {', '.join(counts) or 'none'}"


def total_line(total: Total) -> str:
    """All cases taken together."""
    judgement = total.judgement
    interval = f"{judgement.ratio:.3f} times ({interval_text(judgement.low, judgement.high)})"
    times = f"{total.base_us / 1e3:,.2f} ms, now {total.new_us / 1e3:,.2f} ms"
    return f"all their calls: {times}, {interval}: {judgement.verdict.value}"


def advice(comparison: Comparison) -> Iterator[str]:
    """What would decide what is not sure."""
    unsure = [pair for pair in comparison.pairs if pair.verdict is Verdict.UNSURE]
    unreadable = sum(pair.judgement is None for pair in unsure)
    if unreadable:
        yield f"{counted(unreadable, 'case')}: {UNREADABLE}"
    doubtful = [pair.reason for pair in unsure if pair.judgement is not None and pair.reason]
    if doubtful:
        like = ", or the like" if len(set(doubtful)) > 1 else ""
        yield f"{counted(len(doubtful), 'case')} with a wider interval: {doubtful[0]}{like}"
    more = sorted(pair.more_runs for pair in unsure if pair.more_runs is not None)
    if more:
        half = more[len(more) // 2]
        yield (
            f"{counted(len(more), 'case')} would be decided by more repeats, half of them by {half} more of each run: "
            "opreplay --repeats, or --until-decided BASE"
        )
    lost = sum(pair.more_runs is None and pair.judgement is not None and not pair.reason for pair in unsure)
    if lost:
        verb = "differs" if lost == 1 else "differ"
        yield f"{counted(lost, 'case')} {verb} by about the margin, or less than a machine's pace changes between runs"


INTERVAL = f"{CONFIDENCE:.0%} interval"
