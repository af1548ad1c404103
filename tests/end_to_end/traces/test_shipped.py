"""Shipped traces by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import ROOT, SHIPPED_TRACES, refusal, succeed

from opgrip.replay.replay_options import EXAMPLES
from opgrip.tools.verbs import verbs
from opgrip.traces import load
from opgrip.traces.io.shipped_traces import shipped_traces


@pytest.mark.slow
def test_shipped_trace_is_found_from_any_folder(tmp_path: Path) -> None:
    done = succeed("opgrip", "trace", "info", "trace:faster_rcnn", "--top", "1", cwd=tmp_path)
    assert f"calls       {len(load('trace:faster_rcnn').calls):,}" in done.stdout
    fast = ("--iterations", "1", "--warmup", "0", "--op", "aten.relu*", "--top", "1", "-o", "r.json")
    succeed("opreplay", "trace:faster_rcnn", *fast, cwd=tmp_path)
    assert set(shipped_traces().values()) == {*SHIPPED_TRACES, ROOT / "traces" / "zoo_500.jsonl.gz"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trace:fster_rcnn", "opgrip ships no trace 'fster_rcnn': did you mean faster_rcnn?"),
        ("gpt2", "no such file or directory, and zoo:gpt2.generate is one of the zoo"),
        ("traces/faster_rcnn.jsonl", "no such file or directory, and trace:faster_rcnn is one that ships"),
        ("stp.jsonl", "no such file or directory: did you mean step.jsonl?"),
        ("opinfo:all", "a model is recorded first: opcapture --model opinfo:all; names that are not files are trace:"),
    ],
)
def test_missing_shipped_trace_is_answered_with_a_suggestion(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "step.jsonl").touch()
    assert message in refusal("opreplay", name, cwd=tmp_path)


def test_examples_in_the_help_name_shipped_traces() -> None:
    examples = "\n".join([EXAMPLES, *(verb.examples for _, verb in verbs.items())])
    assert "traces/" not in examples.replace("traces/*.jsonl.gz", "")
    for name in set(re.findall(r"trace:(\w+)", examples)):
        assert name in shipped_traces()
