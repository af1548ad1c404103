"""Fixtures of the plug-in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from opgrip.tools.pytest_plugin.state import BENCHMARKS

if TYPE_CHECKING:
    from opgrip.replay.outcome import Results

RESULTS: pytest.StashKey[Sequence[Results]] = pytest.StashKey()
"""Of a test: what its calls of the fixtures gave."""


@pytest.fixture
def opgrip_replay(request: pytest.FixtureRequest) -> Callable[..., Results]:
    """Replays a trace or samples, as `opgrip.replay.replay` does, with the same options.

    ::

        def test_detector(opgrip_replay):
            results = opgrip_replay("traces/faster_rcnn.jsonl", op=["aten.convolution*"], repeats=3)
            assert all(row.status == "ok" for row in results)
    """

    def run(trace: str | Path, **options: Any) -> Results:
        from opgrip.replay import replay

        return _measure(request.node, replay, trace, **options)

    return run


@pytest.fixture
def opgrip_benchmark(request: pytest.FixtureRequest) -> Callable[..., Results]:
    """Times a function, or several, on inputs, as `opgrip.replay.benchmark` does, with the same options.

    ::

        def test_gelu(opgrip_benchmark):
            opgrip_benchmark(torch.nn.functional.gelu, [[(8, 512)], [(64, 512)]], mode=["eager", "compile"])
    """

    def run(
        function: Callable[..., Any] | Sequence[Callable[..., Any]], inputs: Sequence[Any], **options: Any
    ) -> Results:
        from opgrip.replay import benchmark

        return _measure(request.node, benchmark, function, inputs, **options)

    return run


def _measure(item: pytest.Item, measure: Callable[..., Results], *args: Any, **options: Any) -> Results:
    with item.config.stash[BENCHMARKS].turns.turn():
        results = measure(*args, **options)
    item.stash[RESULTS] = [*item.stash.get(RESULTS, ()), results]
    return results
