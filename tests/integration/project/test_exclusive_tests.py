"""Tests that measuring tests run while no other test does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from turns import turn


def test_exclusive_test_waits_for_running_tests_and_blocks_later_ones(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    order: list[str] = []

    def take(name: str, alone: bool) -> None:
        with turn(tmp_path, gate, alone):
            order.append(name)

    with ThreadPoolExecutor(2) as pool:
        with turn(tmp_path, gate, alone=False):
            take("beside", alone=False)
            first = pool.submit(take, "alone", True)
            assert not wait([first], 0.2).done
            second = pool.submit(take, "after", False)
            assert not wait([second], 0.2).done
            order.append("over")
        wait([first, second])
    assert order == ["beside", "over", "alone", "after"]
