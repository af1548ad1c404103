"""Write the archive of a check or a measurement, whole at any time."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

MOST_BYTES = 40 << 20  # largest file to keep


def write_archive(path: Path, texts: Mapping[str, str], files: Iterable[Path]) -> None:
    """Replace an archive by one with some texts, by name, and files; a kill leaves the old one or the new one."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
        for file in files:
            if file.stat().st_size <= MOST_BYTES:
                archive.write(file, file.name)
    os.replace(unfinished, path)
