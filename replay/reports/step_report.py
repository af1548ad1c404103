"""Printed report of a step replay on one or several ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from opgrip.cli.command import DEVICE_TIME, counted, printable
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.replay.modes import EAGER
from opgrip.replay.reports.results_table import QUIETER, print_results
from opgrip.replay.results.results import Result

if TYPE_CHECKING:
    from opgrip.replay.sequences.ranks.replay_ranks import CollectiveTimes, StepOutcome
    from opgrip.replay.sequences.step_results import SequenceResult

ROWS, REASONS = 20, 12  # default number of printed rows, and maximum number of printed reasons
WITHOUT_DATAFLOW = "because the file does not say which memory calls use: all of them run on generated arguments"
ONLY_CONTENDED = "other processes used the cores in all passes, so its time is not used"


def print_sequence(result: SequenceResult, rows: Sequence[Result], most: int, file: IO[str]) -> None:
    for name, text in _lines(result):
        print_line(f"{name:8} {text}", file, indent=9)
    shown = rows[:most]
    print_results(shown, file)
    if result.is_contended:
        print_line(f"the step is contended: {ONLY_CONTENDED}: {QUIETER}", file)
    elif result.slowed_passes:
        print_line(_slowed(result), file)
    for line in _reasons(result, shown, rows[most:]):
        print_line(printable(line), file)
    if len(rows) > len(shown):
        print_line(f"{counted(len(rows) - len(shown), 'more row')}: --top shows more, --output has all", file)


def _slowed(result: SequenceResult) -> str:
    slowed = f"{result.slowed_passes:,} of {counted(result.timed_passes, 'pass', 'passes')}"
    again = f"; {result.dropped_passes:,} more were discarded and repeated" if result.dropped_passes else ""
    return f"{slowed}: timed while the processor was slowed down, so that times are doubtful{again}"


def _reasons(result: SequenceResult, shown: Sequence[Result], others: Sequence[Result]) -> list[str]:
    printed = {(row.op, row.error) for row in shown}
    lines = {
        (reason.op, reason.reason): f"{reason.status}: {reason.op}, {counted(reason.count, 'call')}: {reason.reason}"
        for reason in result.not_replayed
    }
    for row in others:
        if row.error is not None:
            lines.setdefault((row.op, row.error), f"{row.mode} {row.status}: {row.op}: {row.error}")
    return [line for key, line in lines.items() if key not in printed][:REASONS]


def _lines(result: SequenceResult) -> list[tuple[str, str]]:
    ran = f"{result.replayed:,} replayed, {result.substituted:,} substituted, {result.unsupported:,} unsupported"
    mode = f", under {result.mode}" if result.mode != EAGER else ""
    in_eager = f", {result.in_eager:,} of them in eager" if result.in_eager else ""
    calls = ("calls", f"{result.calls:,}: {ran}{mode}{in_eager}")
    captured = result.captured_ms - result.unsupported_ms
    if result.failure:
        captured_text = f"captured {captured:,.2f} ms, " if result.has_captured_times else ""
        return [calls, ("time", f"{captured_text}nothing was measured: {printable(result.failure)}")]
    times = _captured_times(result, captured) if result.has_captured_times else _replayed_times(result)
    if not result.has_dataflow:
        return [calls, *times, ("memory", f"unknown, {WITHOUT_DATAFLOW}")]
    sizes = (result.captured_peak_bytes, result.replayed_peak_bytes, result.outside_bytes)
    at_most, replayed, before = (f"{size / 1e6:,.2f} MB" for size in sizes)
    memory = f"captured {at_most} at most, replayed {replayed}, in addition to {before} from before the first call"
    return [calls, *times, ("memory", memory)]


def _captured_times(result: SequenceResult, captured: float) -> list[tuple[str, str]]:
    middle = result.replayed_quantile_ms(0.5)
    ratio = f", {middle / captured:.2f} times" if captured and not result.is_contended else ""
    if result.graphs:
        between = f", {counted(result.between_graphs, 'call')} between them" if result.between_graphs else ""
        ratio = f" in {counted(result.graphs, 'graph')}{between}{ratio}"
    if result.streams > 1:
        ratio = f" from the first to the last on {result.streams} streams"
    on_host = result.captured_host_ms - result.unsupported_host_ms
    host = f"captured {on_host:,.2f} ms in these calls, {_replayed(result, result.host_quantile_ms(0.5))}"
    return [
        ("time", f"captured {captured:,.2f} ms in these calls, {_replayed(result, middle)}{ratio} {_passes(result)}"),
        *([("host", f"{host}; the other {DEVICE_TIME}")] if result.has_device_times else []),
        (
            "wall",
            f"captured {result.captured_wall_ms:,.2f} ms from the first call to the last, "
            f"{_replayed(result, result.wall_quantile_ms(0.5))}, without the program's own work between the calls",
        ),
        *([] if result.graphs else [_critical(result)]),
    ]


def _critical(result: SequenceResult) -> tuple[str, str]:
    if not result.has_dataflow:
        return "critical", f"unknown, {WITHOUT_DATAFLOW}"
    text = (
        f"captured {result.captured_critical_ms:,.2f} ms in the longest chain of calls that wait for each other, "
        f"{_replayed(result, result.replayed_critical_ms)}, {counted(result.critical_calls, 'call')}"
    )
    return "critical", text


def _replayed_times(result: SequenceResult) -> list[tuple[str, str]]:
    host = f"{_replayed(result, result.host_quantile_ms(0.5))}; the other {DEVICE_TIME}"
    return [
        ("time", f"{_replayed(result, result.replayed_quantile_ms(0.5))} {_passes(result)}"),
        *([("host", host)] if result.has_device_times else []),
        ("wall", f"{_replayed(result, result.wall_quantile_ms(0.5))} from the first call to the last"),
    ]


def _replayed(result: SequenceResult, time_ms: float) -> str:
    return "replayed contended" if result.is_contended else f"replayed {time_ms:,.2f} ms"


def _passes(result: SequenceResult) -> str:
    if result.is_contended:
        return f"({counted(len(result.replayed_ms), 'pass', 'passes')})"
    low, high = (result.replayed_quantile_ms(share) for share in (0.1, 0.9))
    return f"(p10 {low:,.2f}, p90 {high:,.2f}, {counted(len(result.replayed_ms), 'pass', 'passes')})"


def print_ranks(outcome: StepOutcome, most: int, file: IO[str]) -> None:
    print_table(RANK_COLUMNS, outcome.ranks, file, f"{len(outcome.ranks)} of {outcome.recorded} recorded ranks")
    shown = outcome.collectives[:most]
    if shown:
        print_table(
            COLLECTIVE_COLUMNS, shown, file, "collectives, timed from the arrival of the last rank until all have ended"
        )
    others = len(outcome.collectives) - len(shown)
    if others:
        print_line(f"{counted(others, 'more row')}: --top shows more, --output has all", file)
    if any(item.totals["is_contended"] for item in outcome.ranks):
        print_line(f"the step is contended: {ONLY_CONTENDED}: {QUIETER}", file)
    for text in _left_out(outcome):
        print_line(printable(text), file)


def _name(row: CollectiveTimes) -> str:
    return printable(" ".join(word for word in (row.kind, row.reduction.lower(), row.dtype) if word))


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def _left_out(outcome: StepOutcome) -> list[str]:
    reasons: Counter[str] = Counter()
    for item in outcome.ranks:
        reasons.update(item.left_out)
    lines = [f"left out: {counted(count, 'collective call')}: {reason}" for reason, count in reasons.most_common(12)]
    for item in outcome.ranks:
        lines += [
            f"rank {item.rank}: {entry['status']}: {entry['op']}, {counted(entry['count'], 'call')}: {entry['reason']}"
            for entry in map(dict, item.totals["not_replayed"])
            if entry["reason"] not in item.left_out
        ][:6]
    return lines


def _total(heading: str, name: str, form: str = ",.2f", rank: int = 0) -> TableColumn:
    return TableColumn(heading, lambda item: item.totals.get(name), form, rank)


RANK_COLUMNS = (
    TableColumn("rank", "rank", "d"),
    _total("calls", "calls", ",d"),
    _total("replayed", "replayed", ",d"),
    _total("substituted", "substituted", ",d", 3),
    _total("unsupported", "unsupported", ",d", 3),
    TableColumn("collectives", lambda item: item.times.collectives, ",d", rank=2),
    TableColumn("left out", lambda item: sum(item.left_out.values()), ",d", rank=2),
    TableColumn("captured wall ms", lambda item: item.totals.get("captured_wall_ms") or None, ",.2f", rank=4),
    _total("wall ms", "replayed_wall_ms"),
    TableColumn("held ms", lambda item: item.times.held_ms, ",.2f"),
    TableColumn("waited ms", lambda item: item.times.waited_ms, ",.2f"),
)
COLLECTIVE_COLUMNS = (
    TableColumn("collective", _name),
    TableColumn("ranks", lambda row: _ranks(row.ranks)),
    TableColumn("bytes", "bytes", ",d"),
    TableColumn("calls", "calls", ",d"),
    TableColumn("time us", "median_us", ",.1f"),
    TableColumn("p90", "p90_us", ",.1f", rank=4),
    TableColumn("algbw GB/s", "algorithm_gb_per_s", ",.3f", rank=1),
    TableColumn("busbw GB/s", "bus_gb_per_s", ",.3f"),
    TableColumn("wait us", "wait_us", ",.1f"),
    TableColumn("last", lambda row: f"rank {row.last_rank}, {row.last_share:.0%}", rank=3),
)
