"""Peaks of GPUs by their manufacturers' datasheets, without sparsity."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from opgrip.traces.analysis.machine_ceilings import FLOAT8, TF32


@dataclass(frozen=True, slots=True)
class Datasheet:
    """Highest memory bandwidth in GB/s and rates of matrix products in Tflop/s, by dtype, of a GPU."""

    gb_per_s: float
    tflops: Mapping[str, float]

    def rate(self, dtype: str | None) -> float | None:
        """Return the rate of matrix products in Gflop/s, or None if unknown; all float8 dtypes have the same rate."""
        name = FLOAT8 if (dtype or "").startswith(FLOAT8) else dtype or ""
        tflops = self.tflops.get(name)
        return None if tflops is None else tflops * 1e3


_A100 = {"float64": 19.5, "float32": 19.5, TF32: 156, "bfloat16": 312, "float16": 312, "int8": 624}
_H100 = {"float64": 67, "float32": 67, TF32: 494.5, "bfloat16": 989.5, "float16": 989.5, "int8": 1979, FLOAT8: 1979}
_NVL = {"float64": 60, "float32": 60, TF32: 417.5, "bfloat16": 835.5, "float16": 835.5, "int8": 1670.5, FLOAT8: 1670.5}
_PCIE = {"float64": 51, "float32": 51, TF32: 378, "bfloat16": 756, "float16": 756, "int8": 1513, FLOAT8: 1513}
_A10 = {"float32": 31.2, TF32: 62.5, "bfloat16": 125, "float16": 125, "int8": 250}
_A40 = {"float32": 37.4, TF32: 74.8, "bfloat16": 149.7, "float16": 149.7, "int8": 299.3}
_L4 = {"float32": 30.3, TF32: 60, "bfloat16": 121, "float16": 121, "int8": 242.5, FLOAT8: 242.5}
_L40S = {"float32": 91.6, TF32: 183, "bfloat16": 362, "float16": 362, "int8": 733, FLOAT8: 733}
# datasheets by the part of a GPU's name after the manufacturer's
_SHEETS: Mapping[str, Datasheet] = {
    r"A100-SXM\d-40GB|A100-PCIE-40GB": Datasheet(1555, _A100),
    r"A100-SXM\d-80GB": Datasheet(2039, _A100),
    r"A100 80GB PCIe": Datasheet(1935, _A100),
    r"H100 80GB HBM3": Datasheet(3350, _H100),
    r"H100 PCIe": Datasheet(2000, _PCIE),
    r"H100 NVL": Datasheet(3900, _NVL),
    r"H200": Datasheet(4800, _H100),
    r"H200 NVL": Datasheet(4800, _NVL),
    r"A10": Datasheet(600, _A10),
    r"A40": Datasheet(696, _A40),
    r"L4": Datasheet(300, _L4),
    r"L40S": Datasheet(864, _L40S),
    r"T4": Datasheet(320, {"float32": 8.1, "float16": 65, "int8": 130}),
    r"V100-SXM2-\d+GB": Datasheet(900, {"float64": 7.8, "float32": 15.7, "float16": 125}),
}


def datasheet_of(name: str) -> Datasheet | None:
    """Return the datasheet of a GPU by the name that its driver reports; None if there is none, as for a MIG slice."""
    product = re.sub(r"^(NVIDIA|Tesla) ", "", name)
    return next((sheet for pattern, sheet in _SHEETS.items() if re.fullmatch(pattern, product)), None)
