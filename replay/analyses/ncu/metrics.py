"""What ncu is asked to measure of each kernel.

Names: https://docs.nvidia.com/nsight-compute/ProfilingGuide/index.html, "Metrics Reference".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from opgrip.errors import UserError

DURATION = "gpu__time_duration.sum"
"""In ns."""
SUMS: Mapping[str, tuple[str, ...]] = {
    "ncu_dram_bytes": ("dram__bytes_read.sum", "dram__bytes_write.sum"),
    "ncu_l2_bytes": ("lts__t_bytes.sum",),
}
"""Metrics that add up over the kernels of a run, by the column that holds their sum."""
SHARES: Mapping[str, str] = {
    "ncu_dram_share": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "ncu_l2_share": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "ncu_sm_share": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "ncu_tensor_share": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "ncu_occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
"""Percentages of a kernel, by the column that holds their mean over a run, weighted by the kernels' times."""
BASIC = (DURATION, *(name for names in SUMS.values() for name in names), *SHARES.values())
SETS: Mapping[str, tuple[str, ...]] = {
    "basic": BASIC,
    "memory": (
        *BASIC,
        "l1tex__t_bytes.sum",
        "l1tex__t_sector_hit_rate.pct",
        "lts__t_sector_hit_rate.pct",
    ),
    "compute": (
        *BASIC,
        "smsp__inst_executed.sum",
        "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum",
        "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum",
        "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
    ),
}
NAMED = re.compile(r"[a-z0-9]+__\w+(\.\w+)*")
"""A metric of ncu: its unit, two underscores, and what is counted and how it is summed up."""


def metrics_of(text: str) -> tuple[str, ...]:
    """The metrics that sets and names with commas between them stand for, the time of a kernel always among them.

    Raises
    ------
    UserError : where one is neither
    """
    metric_names = [DURATION]
    for word in filter(None, (word.strip() for word in text.split(","))):
        if word not in SETS and not NAMED.fullmatch(word):
            raise UserError(f"{word!r} is no metric", f"name a set, {', '.join(SETS)}, or some of ncu --query-metrics")
        metric_names += SETS.get(word, (word,))
    return tuple(dict.fromkeys(metric_names))
