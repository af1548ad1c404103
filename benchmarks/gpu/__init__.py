"""Steps that check and measure opgrip on an accelerator, each in a separate process."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
if find_spec("opgrip") is None:
    # opgrip is not installed: it works from the checkout
    sys.path.append(str(ROOT))
