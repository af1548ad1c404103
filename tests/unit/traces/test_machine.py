"""Facts about the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from opgrip.platform import machine

MB = 1 << 20


def container(folder: Path, most: str, used: int, idle_files: int) -> None:
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - idle_files}\ninactive_file {idle_files}\nactive_file 7\n")


def test_file_cache_of_a_container_counts_as_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    container(tmp_path, str(100 * MB), used=90 * MB, idle_files=60 * MB)
    assert machine.free_memory("cpu") == 70 * MB


def test_full_container_has_no_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    container(tmp_path, str(100 * MB), used=120 * MB, idle_files=0)
    assert machine.free_memory("cpu") == 0


def test_memory_of_the_machine_counts_without_a_container_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    free = machine.free_memory("cpu")
    container(tmp_path, "max", used=90 * MB, idle_files=0)
    again = machine.free_memory("cpu")
    assert free is not None
    assert again is not None
    assert again > free / 2
