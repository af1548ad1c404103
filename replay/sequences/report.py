"""The result of a whole sequence, for people."""

from __future__ import annotations

from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from opgrip.replay.sequences.results import SequenceResult

OPERATORS, REASONS = 12, 12


def print_sequence(result: SequenceResult, file: IO[str]) -> None:
    """Print time and memory of a step beside the captured ones, the operators that take most, and what did not run."""
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=120)
    for name, text in _lines(result):
        console.print(Text(f"{name:8} {text}"), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in ("operator", "calls", "captured us", "replayed us", "ratio"):
        table.add_column(name, justify="left" if name == "operator" else "right", no_wrap=True)
    for item in result.operators[:OPERATORS]:
        ratio = item.replayed_us / item.captured_us if item.captured_us else float("nan")
        row = (item.op, f"{item.count:,}", f"{item.captured_us:,.0f}", f"{item.replayed_us:,.0f}", f"{ratio:.2f}")
        table.add_row(*map(Text, row))
    console.print(table)
    for reason in result.not_replayed[:REASONS]:
        text = f"{reason.status}: {reason.op}, {reason.count:,} calls: {reason.reason}"
        console.print(Text(text), soft_wrap=True)


def _lines(result: SequenceResult) -> list[tuple[str, str]]:
    middle, low, high = (result.replayed_quantile_ms(share) for share in (0.5, 0.1, 0.9))
    ran = f"{result.replayed:,} replayed, {result.substituted:,} substituted, {result.unsupported:,} unsupported"
    captured = result.captured_ms - result.unsupported_ms
    ratio = f", {middle / captured:.2f} times" if captured else ""
    megabytes = [size / 1e6 for size in (result.captured_peak_bytes, result.replayed_peak_bytes, result.outside_bytes)]
    return [
        ("calls", f"{result.calls:,}: {ran}"),
        (
            "time",
            f"captured {captured:,.2f} ms in these calls, replayed {middle:,.2f} ms{ratio} "
            f"(p10 {low:,.2f}, p90 {high:,.2f}, {result.repeats} passes)",
        ),
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
