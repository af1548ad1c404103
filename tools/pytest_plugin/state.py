"""Where the plug-in keeps what it knows of a run, and of a test."""

from __future__ import annotations

import pytest

from opgrip.tools.pytest_plugin.measured import Benchmarks, Judged

BENCHMARKS = pytest.StashKey[Benchmarks]()
"""Of the run."""
JUDGED = pytest.StashKey[Judged]()
"""Of a test that measured something."""
