"""The result of a whole sequence, for people."""

from __future__ import annotations

from typing import IO

from opgrip.replay.sequences.results import OperatorTime, SequenceResult
from opgrip.traces.command import printable
from opgrip.traces.tables import TableColumn, print_table
from opgrip.traces.terminal import print_line
from opgrip.traces.words import DEVICE_TIME, counted

OPERATORS, REASONS = 12, 12


def print_sequence(result: SequenceResult, file: IO[str]) -> None:
    """Print time and memory of a step beside the captured ones, the operators that take most, and what did not run."""
    for name, text in _lines(result):
        print_line(f"{name:8} {text}", file, indent=9)
    shown = result.operators[:OPERATORS]
    columns = [
        TableColumn("operator", [item.op for item in shown], is_number=False, least=20),
        TableColumn("calls", [f"{item.count:,}" for item in shown]),
        TableColumn("captured us", [f"{item.captured_us:,.0f}" for item in shown]),
        TableColumn("replayed us", [f"{item.replayed_us:,.0f}" for item in shown]),
        TableColumn("ratio", [_ratio(item) for item in shown]),
    ]
    if result.has_device_times:
        columns += [
            TableColumn("captured host us", [f"{item.captured_host_us:,.0f}" for item in shown], rank=1),
            TableColumn("replayed host us", [f"{item.replayed_host_us:,.0f}" for item in shown], rank=1),
        ]
    print_table(columns, file)
    for reason in result.not_replayed[:REASONS]:
        text = f"{reason.status}: {reason.op}, {counted(reason.count, 'call')}: {reason.reason}"
        print_line(printable(text), file)


def _ratio(item: OperatorTime) -> str:
    return f"{item.replayed_us / item.captured_us:.2f}" if item.captured_us else "-"


def _lines(result: SequenceResult) -> list[tuple[str, str]]:
    middle, low, high = (result.replayed_quantile_ms(share) for share in (0.5, 0.1, 0.9))
    ran = f"{result.replayed:,} replayed, {result.substituted:,} substituted, {result.unsupported:,} unsupported"
    captured, on_host = (
        result.captured_ms - result.unsupported_ms,
        result.captured_host_ms - result.unsupported_host_ms,
    )
    ratio = f", {middle / captured:.2f} times" if captured else ""
    host = f"captured {on_host:,.2f} ms in these calls, replayed {result.host_quantile_ms(0.5):,.2f} ms"
    megabytes = [size / 1e6 for size in (result.captured_peak_bytes, result.replayed_peak_bytes, result.outside_bytes)]
    return [
        ("calls", f"{result.calls:,}: {ran}"),
        (
            "time",
            f"captured {captured:,.2f} ms in these calls, replayed {middle:,.2f} ms{ratio} "
            f"(p10 {low:,.2f}, p90 {high:,.2f}, {counted(len(result.replayed_ms), 'pass', 'passes')})",
        ),
        *([("host", f"{host}; the other {DEVICE_TIME}")] if result.has_device_times else []),
        (
            "wall",
            f"captured {result.captured_wall_ms:,.2f} ms from first to last, "
            f"replayed {result.wall_quantile_ms(0.5):,.2f} ms, without the program between the calls",
        ),
        (
            "memory",
            f"captured {megabytes[0]:,.2f} MB at most, replayed {megabytes[1]:,.2f} MB, "
            f"beside {megabytes[2]:,.2f} MB from before",
        ),
    ]
