"""Commands in docs/coming-from.md for users of other tools, run line by line."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from foreign_data import write_as
from pasted import PROGRAMS, TRAIN, Pasted, has_valid_options, run_pasted, why_not
from programs import ROOT, run_command

from opgrip.replay.comparison.results_store import Store
from opgrip.traces import load

sys.path.insert(0, str(ROOT / "tests/support/fuzz"))

from foreign_seeds import BUILDERS

DOCUMENT = ROOT / "docs" / "coming-from.md"
GRAPH = """import torch


class GraphModule(torch.nn.Module):
    def forward(self, L_x_: torch.Tensor):
        return (torch.nn.functional.relu(L_x_),)
"""
SPAN = re.compile(r"`([^`]+)`")


def _commands() -> list[Pasted]:
    """Return the commands in the last column of each table."""
    commands = []
    for number, line in enumerate(DOCUMENT.read_text(encoding="utf-8").splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 2 and cells[1] not in {"here", "---"}:
            spans = SPAN.findall(cells[1])
            commands += [Pasted(number, text) for text in spans if text.partition(" ")[0] in PROGRAMS]
    return commands


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create one file of each kind that the commands use."""
    path = tmp_path_factory.mktemp("coming-from")

    def run(*words: str) -> None:
        run_command(*words, cwd=path).check_returncode()

    (path / "train.py").write_text(TRAIN, encoding="utf-8")
    run("opcapture", "-o", "script.jsonl", "--", "train.py")
    trace = load(path / "script.jsonl")
    write_as("tritonbench", trace, path / "inputs.txt")
    write_as("execution_trace", trace, path / "et.json")
    write_as("backendbench", trace, path / "ops.parquet")
    columns = "id,source_neural_network,num_of_calls,parameters"
    parameters = "{'condition': [[8, 4]], 'tensor1': [[8, 4]], 'tensor2': [[8, 4]]}"
    (path / "where.csv").write_text(f'{columns}\n#0,yolact_r50_8x8_coco,12,"{parameters}"\n')
    for table in ("abs.json", "relu.json"):
        (path / table).write_text(json.dumps({"input_size": [[2, 3], [16, 8]]}), encoding="utf-8")
    tensors = [{"type": "tensor", "dtype": "float", "shape": [8, size]} for size in range(1, 6)]
    config = {"torch.add": {"config": [{"input": [{"args": [tensor, tensor], "kwargs": {}} for tensor in tensors]}]}}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    run("opgrip", "trace", "convert", "script.jsonl", "dataset", "--to", "flashinfer")
    (path / "graph").mkdir()
    (path / "graph" / "model.py").write_text(GRAPH)
    (path / "graph" / "weight_meta.py").write_text(
        'class Program_weight_tensor_meta_L_x_:\n    name = "L_x_"\n    shape = [2, 3]\n'
        '    dtype = "torch.float32"\n    device = "cpu"\n    mean = 0.0\n    std = 1.0\n    data = None\n'
    )
    for name in ("aiter", "tritonparse", "flashinfer"):
        BUILDERS[name](path)
    for name in ("results.json", "again.json"):
        run("opreplay", "script.jsonl", "--iterations", "3", "--top", "3", "-o", name)
    return path


@pytest.mark.parametrize("command", _commands(), ids=lambda pasted: str(pasted.line))
def test_options_of_each_pasted_command_exist(command: Pasted) -> None:
    assert has_valid_options(command)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", _commands(), ids=lambda pasted: str(pasted.line))
def test_each_pasted_command_works(command: Pasted, folder: Path, tmp_path: Path) -> None:
    reason = why_not("docs/coming-from.md", command)
    if reason is not None:
        pytest.skip(reason)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    problem = run_pasted(command, tmp_path, tmp_path / "cache")
    assert not problem, problem
    if "--backward" in command.command:
        store = Store(tmp_path / ".runs")
        rows = [row for row in store.runs()[-1].load() if row.direction == "backward"]
        assert any(row.status == "ok" for row in rows), [row.error for row in rows]
