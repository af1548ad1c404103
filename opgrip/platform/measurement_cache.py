"""What was measured of this machine, kept for the next time."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from opgrip.cli.output_files import whole_file
from opgrip.errors import UserError
from opgrip.platform.machine import cache_folder, processor


def measure_once(what: str, device: str, measure: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
    """Numbers as measured now, or at an earlier time with this processor, number of threads and version of torch.

    They are kept in `measured.json`, in the user's folder for caches.
    """
    key = [what, device, *processor(device), f"{torch.get_num_threads()} threads", f"torch {torch.__version__}"]
    path, name = cache_folder() / "measured.json", ", ".join(key)
    numbers_by_name = _read_cache(path)
    if name not in numbers_by_name:
        numbers_by_name[name] = list(measure())
        # where the folder cannot be written, they are measured again the next time
        with suppress(OSError, UserError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path, force=True) as file:
                file.write(json.dumps(numbers_by_name, indent=1).encode())
    return tuple(numbers_by_name[name])


def _read_cache(path: Path) -> dict[str, list[float]]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    pairs = content.items() if isinstance(content, dict) else ()
    return {name: values for name, values in pairs if _is_numbers(values)}


def _is_numbers(values: object) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(item, float) and item >= 0 for item in values)
