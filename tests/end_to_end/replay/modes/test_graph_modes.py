"""CUDA graph modes: their combination with options, and their status without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import refusal, run_command

from opgrip.replay import Results

GRAPH = ("--exec-mode", "graph")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*GRAPH, "--mode", "cudagraph"), "cannot capture cudagraph, which runs CUDA graphs itself"),
        (
            (*GRAPH, "--mode", "jit,reduce-overhead"),
            "cannot capture reduce-overhead, which runs CUDA graphs itself",
        ),
        ((*GRAPH, "--mode", "compile:cudagraphs"), "cannot capture compile:cudagraphs, which runs CUDA graphs itself"),
        ((*GRAPH, "--reference", "cudagraph"), "cannot capture cudagraph, which runs CUDA graphs itself"),
        ((*GRAPH, "--backward"), "cannot capture a backward pass, which runs on the stream of its forward pass"),
    ],
)
def test_graph_inside_a_graph_is_refused_in_one_line(tiny_trace: Path, options: tuple[str, ...], message: str) -> None:
    error = refusal("opreplay", tiny_trace, *options, in_one_line=True)
    assert error.startswith("opreplay: error: --exec-mode graph ")
    assert message in error
    assert error.endswith(": time it with --exec-mode events\n")


def test_row_explains_that_graph_modes_need_a_gpu(tiny_trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    modes = ("--mode", "reduce-overhead,cudagraph", "--top", "1", "--iterations", "2", "--jobs", "1")
    done = run_command("opreplay", tiny_trace, *modes, "-o", output)
    assert done.returncode == 1, done.stderr
    assert "nothing ran with --mode reduce-overhead: " in done.stderr
    rows = Results.load(output).frame.set_index("mode")
    assert rows.loc["reduce-overhead", "status"] == rows.loc["cudagraph", "status"] == "unsupported"
    message = "it needs CUDA graphs, which cpu does not support: use compile"
    assert rows.loc["reduce-overhead", "error"] == message
    assert rows.loc["cudagraph", "error"] == "cudagraph runs on cuda, not on cpu"


@pytest.mark.slow
def test_graph_mode_is_refused_with_several_streams(tiny_trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    several = ("--mode", "reduce-overhead", "--streams", "2", "--top", "1", "--iterations", "2", "--jobs", "1")
    done = run_command("opreplay", tiny_trace, *several, "-o", output)
    assert done.returncode == 1, done.stderr
    assert "nothing ran with --mode reduce-overhead: " in done.stderr
    row = Results.load(output).frame.set_index("mode").loc["reduce-overhead"]
    assert row["status"] == "unsupported"
    assert row["error"] == "reduce-overhead replays CUDA graphs in one thread: remove --streams"
