"""A script that reads a report with `ncu_report`, the Python module of Nsight Compute; it does not import opgrip.

The module loads a library that may crash, so it runs in a separate process.
Source: https://docs.nvidia.com/nsight-compute/PythonReportInterface/index.html
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def main(folder: str, report: str, *metric_names: str) -> int:
    """Print the kernels of a report as JSON Lines."""
    sys.path.insert(0, folder)
    context = importlib.import_module("ncu_report").load_report(report)
    for place in range(context.num_ranges()):
        profiled_range = context.range_by_idx(place)
        for index in range(profiled_range.num_actions()):
            action = profiled_range.action_by_idx(index)
            values = {name: _value(action.metric_by_name(name)) for name in metric_names}
            metrics = {name: value for name, value in values.items() if value is not None}
            print(json.dumps({"name": action.name(), "ranges": _ranges(action), "metrics": metrics}))
    return 0


def _ranges(action: Any) -> str:
    """Return the names of the NVTX ranges around a kernel launch, one per line."""
    state = action.nvtx_state()
    domains = [] if state is None else [state.domain_by_id(number) for number in state.domains()]
    return "\n".join(name for domain in domains for name in domain.start_end_ranges())


def _value(metric: Any) -> float | None:
    value = None if metric is None else metric.value()
    return float(value) if isinstance(value, int | float) else None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
