"""Checks that a redacted trace replays like the original: with the same output sizes and similar times.

`python -m opgrip.tools.redaction_check TRACE NUMBER ...` prints the output sizes of calls, given by signature number,
as one line of JSON each. A call may crash that process.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from opgrip.cli.command import counted
from opgrip.errors import one_line
from opgrip.platform.sandbox import run_program
from opgrip.replay import Results, compare, replay
from opgrip.replay.cases.cases import contexts_of
from opgrip.replay.comparison.differences import Verdict
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.replay.operators.contexts import restored
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.traces import Trace, load
from opgrip.traces.schema.arguments import leaves, tensors
from opgrip.traces.schema.records import Signature
from opgrip.traces.table.call_table import COUNT

CASES = 10  # number of replayed cases; the cases with most time are chosen
REPEATS = "3"
CRASHED = "its process crashed"

Given = dict[int, Any]  # output sizes by signature, or the reason why there are none


@dataclass(frozen=True, slots=True)
class RedactionCheck:
    """Comparison of the replays of a trace and of its redacted version.

    cases : number of replayed cases
    sized : number of cases whose outputs have the same sizes in both, or that cannot run for the same reason in both
    ran : number of cases of the original trace that could run
    other_sizes : (operator, result of the original, result of the redacted trace) of each case in which they differ
    broken : operators whose redacted calls no longer run
    verdicts : number of cases by verdict on their times, as in `opgrip compare`
    """

    cases: int
    sized: int
    ran: int
    other_sizes: list[tuple[str, str, str]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    verdicts: Counter[Verdict] = field(default_factory=Counter)

    @property
    def passed(self) -> bool:
        """Return True if no case has other sizes or no longer runs after redaction, and at least one case could run."""
        return not self.other_sizes and not self.broken and (self.ran > 0 or not self.cases)

    def lines(self) -> Iterator[str]:
        """Yield the lines of a report: a summary, then one line for each case that differs."""
        alike = f"same output sizes in {counted(self.sized, 'case')}"
        times = ", ".join(f"{verdict.value.lower()} {self.verdicts[verdict]:,}" for verdict in Verdict)
        yield (
            f"check: {counted(self.cases, 'case')} of each trace replayed: {alike}; times of the redacted "
            f"trace: {times}"
        )
        if self.cases and not self.ran:
            yield "check: no case could be replayed here, nothing was compared"
        for op, one, other in self.other_sizes:
            yield f"check: {op} returned {other}, and {one} before it was redacted"
        for op in self.broken:
            yield f"check: {op} can no longer be replayed"


def check_replays(original: Path, redacted: Path) -> RedactionCheck:
    """Replay the `CASES` cases that take most time from both traces, and return their comparison.

    original, redacted : files of the two traces
    """
    trace = load(original, partial=True)
    numbers = _longest(trace)
    both = [_shapes(path, numbers) for path in (original, redacted)]
    signatures = {item.number: item for item in trace.signatures}
    differing = [
        (
            signatures[number].op,
            _describe_result(both[0].get(number), recorded_shapes(signatures[number])),
            _describe_result(after, None),
        )
        for number in numbers
        if _kind(both[0].get(number)) != _kind(after := both[1].get(number))
    ]
    base, new = (replay(path, top=CASES, repeats=REPEATS) for path in (original, redacted))
    comparison = compare(base, _with_keys_of(base, new))
    broken = [pair.new.op for pair in comparison.broken]
    ran = sum("shapes" in both[0].get(number, {}) for number in numbers)
    return RedactionCheck(len(numbers), len(numbers) - len(differing), ran, differing, broken, comparison.counts)


def _longest(trace: Trace) -> list[int]:
    """Return the numbers of the `CASES` signatures whose calls take most time."""
    calls = trace.own_distinct_calls
    times = (calls["time_ns"] * calls[COUNT]).groupby(calls["signature"]).sum()
    return [int(number) for number in times.sort_values(ascending=False).index[:CASES]]


def _shapes(path: Path, numbers: Sequence[int]) -> Given:
    """Return the output sizes of signatures by number; they run in separate processes, because a call may crash its
    process.
    """
    results: Given = {}
    remaining = list(numbers)
    while remaining:
        command = [sys.executable, "-m", "opgrip.tools.redaction_check", str(path), *map(str, remaining)]
        output = run_program(command).output
        rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        results |= {row.pop("signature"): row for row in rows}
        if len(rows) < len(remaining):
            results[remaining[len(rows)]] = {"error": CRASHED}
        remaining = remaining[len(rows) + 1 :]
    return results


def _kind(result: Any) -> Any:
    """Return the part of a result (`result`) that is compared: the output sizes, or the class of the error."""
    if not result or "shapes" in result:
        return result and result["shapes"]
    # compare only the class of an error, since its text may contain what was redacted
    return [(name, text.partition(":")[0]) for name, text in result.items()]


def _describe_result(result: Any, recorded: Shapes | None) -> str:
    text = next(iter(result.values())) if result else "nothing"
    return f"{text}, recorded {recorded}" if recorded is not None and text != recorded else str(text)


def _with_keys_of(base: Results, new: Results) -> Results:
    """Return the new rows with the keys and shapes of the original ones, because redaction rounds the numbers on which
    keys depend.
    """
    keys = {row.case: (row.key, row.shapes) for row in base}
    rows = [replace(row, key=keys[row.case][0], shapes=keys[row.case][1]) if row.case in keys else row for row in new]
    return Results(rows, new.header)


Shapes = list[list[int]]


def main(path: str, numbers: Sequence[str]) -> None:
    """Print the output sizes of calls, given by signature number, as one line of JSON each."""
    trace = load(Path(path), partial=True)
    contexts = contexts_of(trace, trace.own_distinct_calls)
    signatures = {item.number: item for item in trace.signatures}
    for number in map(int, numbers):
        signature = signatures[number]
        with warnings.catch_warnings(), restored(contexts.get(number, {})):
            warnings.simplefilter("ignore")
            print(json.dumps({"signature": number, **_run(signature, trace.values)}), flush=True)


def recorded_shapes(signature: Signature) -> Shapes:
    """Return the output sizes of a signature, which were recorded at its first call."""
    return [list(spec.shape) for spec in tensors(signature.outputs)]


def _run(signature: Signature, values: Mapping[int, Any]) -> dict[str, Any]:
    device = next((spec.device for spec in tensors([signature.args, signature.kwargs])), "cpu")
    place = device_map(device, None if _is_there(device) else "cpu")
    try:
        operator = find_operator(signature)
        args, kwargs = Inputs(signature.args, signature.kwargs, values, place, seed=0).make()
        result = operator.function(*args, **kwargs)
    except Unsupported as error:
        return {"unsupported": one_line(error)}
    except Exception as error:
        return {"error": one_line(error)}
    return {"shapes": [list(tensor.shape) for tensor in _tensors(result)]}


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor))


def _is_there(device: str) -> bool:
    kind = device.partition(":")[0]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return kind == "cpu" or (accelerator is not None and accelerator.type == kind)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
