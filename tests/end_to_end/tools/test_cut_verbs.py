"""Verbs on files that describe more cases than can be read."""

from __future__ import annotations

import json
from pathlib import Path

from programs import refusal, run_command, succeed

MANY = {
    "torch.mm": {
        "input_iterator": "RangeConfigIterator",
        "input_data_generator": "PyTorch:DefaultDataGenerator",
        "config": [
            {
                "input": [
                    {
                        "args": [
                            {"type": "tensor", "dtype": "float", "shape": [[1, 1000, 1], 8], "__range__": ["shape"]},
                            {"type": "tensor", "dtype": "float", "shape": [8, [1, 1000, 1]], "__range__": ["shape"]},
                        ]
                    }
                ]
            }
        ],
    }
}


def test_part_of_a_million_cases_is_shown_listed_and_exported(tmp_path: Path) -> None:
    (tmp_path / "many.json").write_text(json.dumps(MANY))
    assert "represents 1,000,000 cases" in refusal("opgrip", "trace", "info", "many.json", cwd=tmp_path)
    sampled = run_command("opgrip", "trace", "info", "many.json", "--sample", "5", cwd=tmp_path)
    assert "5 of 1 operator" in sampled.stdout, sampled.stderr
    last = ("many.json", "--start", "999999")
    shown = run_command("opgrip", "trace", "info", *last, cwd=tmp_path)
    assert "1 of 1 operator" in shown.stdout, shown.stderr
    succeed("opgrip", "trace", "export-case", *last, "0", "-o", "case.py", cwd=tmp_path)
    assert "1000" in (tmp_path / "case.py").read_text()
