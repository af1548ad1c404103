"""A script that prints the kernels in a report of Nsight Compute, read with the Python module `ncu_report`."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def main(folder: str, report: str, *metric_names: str) -> int:
    """Print the kernels of a report as JSON Lines, each with its name, NVTX ranges and metrics."""
    sys.path.insert(0, folder)
    context = importlib.import_module("ncu_report").load_report(report)
    for number in range(context.num_ranges()):
        profiled_range = context.range_by_idx(number)
        for index in range(profiled_range.num_actions()):
            action = profiled_range.action_by_idx(index)
            values = {name: _value(action.metric_by_name(name)) for name in metric_names}
            metrics = {name: value for name, value in values.items() if value is not None}
            print(json.dumps({"name": action.name(), "ranges": _ranges(action), "metrics": metrics}))
    return 0


def _ranges(action: Any) -> str:
    state = action.nvtx_state()
    domains = [] if state is None else [state.domain_by_id(number) for number in state.domains()]
    return "\n".join(name for domain in domains for name in domain.start_end_ranges())


def _value(metric: Any) -> float | None:
    value = None if metric is None else metric.value()
    return float(value) if isinstance(value, int | float) else None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
