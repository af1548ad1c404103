"""Tests of `replay()` called from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_python, succeed

import opgrip
from opgrip.cli.options import arguments_of
from opgrip.replay import Results, replay
from opgrip.replay.replay_options import make_parser
from opgrip.traces import UserError

FAST = {"iterations": 1, "warmup": 0}
OPS = ("aten.convolution.default", "aten.native_batch_norm.default")


@pytest.fixture(scope="module")
def results(tiny_trace: Path) -> Results:
    return replay(tiny_trace, mode=["eager", "jit"], op=OPS, **FAST)


def test_replay_function_and_opreplay_return_the_same_rows(results: Results, tiny_trace: Path, tmp_path: Path) -> None:
    options = ("--mode", "eager,jit", "--op", OPS[0], "--op", OPS[1], "--iterations", 1, "--warmup", 0)
    succeed("opreplay", tiny_trace, *options, "-o", tmp_path / "r.json")
    same = ["case", "op", "shapes", "count", "mode", "status", "method", "cache"]
    assert results.frame[same].to_dict("records") == Results.load(tmp_path / "r.json").frame[same].to_dict("records")


def test_appended_cases_have_unused_numbers(tmp_path: Path) -> None:
    output = tmp_path / "r.csv"
    for op in ("aten.neg", "aten.abs", "aten.neg", "aten.abs"):
        replay(operator=op, inputs={"self": (4,)}, output=output, append=True, **FAST)
    rows = [(row.case, row.op) for row in Results.load(output)]
    assert rows == [(0, "aten.neg.default"), (1, "aten.abs.default")] * 2


def test_results_and_traces_are_loaded_compared_and_filtered(
    results: Results, tiny_trace: Path, tmp_path: Path
) -> None:
    for suffix in (".json", ".csv", ".parquet"):
        results.save(tmp_path / f"r{suffix}")
        loaded = opgrip.load(tmp_path / f"r{suffix}")
        assert isinstance(loaded, Results)
        assert loaded[0].median_us == results[0].median_us
    assert len(opgrip.compare(tmp_path / "r.json", results).pairs) == 4
    for path in (tiny_trace, "no_such.jsonl"):
        with pytest.raises(UserError, match=r"is not a file of results: write one with opreplay|cannot be read"):
            opgrip.compare(results, path)
    trace = opgrip.load(tiny_trace)
    part = trace.filter(op=["aten.conv*", "aten.relu*"], phase="forward")
    assert 0 < part.call_count < trace.call_count
    assert part.summary(by=["op", "phase"])["calls"].sum() == len(part.calls)
    assert {row.phase for row in replay(part, **FAST)} == {"forward"}
    with pytest.raises(UserError, match="already filtered: pass all conditions"):
        part.filter(op="aten.relu*")
    with pytest.raises(UserError, match="only whole files"):
        replay(opgrip.load(tiny_trace, steps=1))


def test_results_have_a_summary_and_are_saved(results: Results, tmp_path: Path) -> None:
    assert repr(results).endswith("tiny.jsonl: 2 cases in 4 rows: 4 ok>")
    assert results._repr_html_().count("<tr") == 5
    assert [row.mode for row in results] == ["eager", "jit"] * 2
    results.save(tmp_path / "r.json")
    assert len(Results.load(tmp_path / "r.json")) == len(results)
    with pytest.raises(FileExistsError, match="force="):
        results.save(tmp_path / "r.json")
    results.save(tmp_path / "r.json", force=True)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"top": 3, "precision": "5%"}, ("--top", "3", "--precision", "0.05")),
        ({"op": ["aten.a*", "aten.b*"]}, ("--op", "aten.a*", "--op", "aten.b*")),
        ({"threads": [1, 2]}, ("--threads", "1,2")),
        ({"dtype": torch.bfloat16}, ("--dtype", "bfloat16")),
        ({"device": torch.device("cuda", 0)}, ("--device", "cuda:0")),
        ({"memory_limit": "8GB", "exec_mode": "continuous"}, ("--memory-limit", "8GB", "--exec-mode", "continuous")),
        ({"output": Path("r.json"), "budget": None}, ("-o", "r.json")),
    ],
)
def test_keywords_are_the_options_of_the_command(keywords: dict[str, Any], words: tuple[str, ...]) -> None:
    assert arguments_of(make_parser(), ["t.jsonl"], keywords) == make_parser().parse_args(["t.jsonl", *words])


def test_inputs_and_configurations_may_be_dictionaries() -> None:
    inputs = [{"self": (8, 4), "other": [8, 1]}, {"self": (2,), "other": 1.5}]
    rows = replay(operator=["aten.add", torch.ops.aten.sub], inputs=inputs, **FAST)
    assert [(row.op, row.shapes, row.status) for row in rows] == [
        (f"aten.{name}.{overload}", shapes, "ok")
        for name in ("add", "sub")
        for overload, shapes in (("Tensor", "float32[8,4] float32[8,1]"), ("Scalar", "float32[2] 1.5"))
    ]
    (row,) = replay(operator="aten.sum", inputs={"self": (8,), "dtype": torch.float64}, **FAST)
    assert (row.shapes, row.status) == ("float32[8] dtype=float64", "ok")
    tensor = {"type": "tensor", "dtype": "float", "shape": [8, 8]}
    config = {"torch.add": {"config": [{"input": [{"args": [tensor, tensor], "kwargs": {}}]}]}}
    results = replay(config, **FAST)
    assert repr(results) == "<Results of configuration.json: 1 case: 1 ok>"


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"top": 0}, "top: '0' is not an integer of at least 1"),
        ({"backward": 1}, "backward=1 is neither True nor False"),
        ({"output": "r.txt"}, "r.txt has no known suffix: end its name in .csv, .json"),
        ({"mode": "no_such"}, "unknown mode 'no_such'"),
        ({"inputs": {"self": (2,)}}, "inputs= needs operator="),
        ({"inputs": {"self": torch.ones(2)}}, "an argument cannot be a Tensor: give the tensor's shape as a tuple"),
    ],
)
def test_invalid_option_value_is_reported_in_python_terms(
    tiny_trace: Path, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        replay(tiny_trace, **keywords)
    assert str(caught.value).startswith(message)
    assert "--" not in str(caught.value)


def test_unknown_keyword_and_missing_file_raise_standard_exceptions() -> None:
    with pytest.raises(TypeError, match=r"keyword argument 'modes': did you mean 'mode'"):
        replay("t.jsonl", modes="jit")
    with pytest.raises(FileNotFoundError, match="no such file"):
        replay("no_such.jsonl")


SCRIPT = """
import sys
import torch
from opgrip.replay import replay

if __name__ == "__main__":
    torch.ones(3) + 1
    results = replay(sys.argv[1], top=2, iterations=1, warmup=0)
    print(len(results))
"""


@pytest.mark.slow
def test_script_that_has_used_torch_replays_without_extra_output(tiny_trace: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_python("script.py", tiny_trace, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
