"""How tests measure cases: by options' words, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from opgrip.replay.measuring.settings import Settings
from opgrip.replay.options import job_with
from opgrip.replay.workers.job import settings_for


def settings_of(*, store: Path | None = None, memory: bool = False, detail: bool = False, **options: Any) -> Settings:
    """Settings by the words of options; what compilers make is kept nowhere."""
    plan = replace(job_with("trace.jsonl", **options).plan, store=None if store is None else str(store), detail=detail)
    return replace(settings_for(plan), memory=memory)
