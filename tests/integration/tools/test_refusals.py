"""Command lines that `opgrip` refuses, with exit status 2 and one line that says why."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from programs import SHIPPED_TRACES

from opgrip.tools.opgrip import main

KINDS = "choose from came, went, counts, shares, values, operators, any"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trace nothing", "invalid choice 'nothing'"),
        ("trace info", "the following arguments are required: TRACE"),
        ("trace info https://a.com/net.onnx", "https://a.com/net.onnx is a URL, not a file: download it first"),
        ("trace validate none.jsonl", "none.jsonl cannot be read: no such file"),
        ("trace timeline t.jsonl -o timeline.svg", "timeline.svg is not the name of a .json or .json.gz file"),
        ("trace graph t.jsonl -o graph.dot", "graph.dot is not the name of a"),
        ("trace diff t.jsonl t.jsonl --fail-on gone", f"--fail-on gone is not a kind of difference: {KINDS}"),
        ("trace diff t.jsonl empty", "empty contains no traces"),
        ("trace merge t.jsonl ./t.jsonl -o all.jsonl", "t.jsonl is named twice: name each trace once"),
        (
            "trace ranks t.jsonl",
            "has the calls of only one process: join the traces of its ranks with opgrip trace merge",
        ),
        ("trace redact t.jsonl -o t.jsonl -f", "t.jsonl is both the trace and the output"),
        ("trace redact t.jsonl -o r.jsonl --report t.jsonl -f", "t.jsonl is both the trace and the report"),
        ("trace redact t.jsonl -o r.jsonl --keep names", "--keep names: unknown kind of content"),
        (f"trace redact t.jsonl -o r.jsonl --salt-file {os.devnull}", "contains no salt"),
        ("longtail t.jsonl -o rows.xlsx", "rows.xlsx is not the name of"),
        ("longtail t.jsonl --bandwidth -3", "is not a bandwidth in GB/s above 0"),
        ("samples list --tag Fast", "unknown tag 'Fast': choose from ForLoop, "),
        ("samples list no_such*", "no sample matches these names and tags: "),
        ("samples show bbox2dlta", "unknown sample 'bbox2dlta': did you mean bbox2delta"),
        ("report absent.json -o r.pdf", "r.pdf is not an HTML file: choose a name that ends with .html"),
    ],
)
def test_refusal_is_one_line_and_writes_nothing(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(SHIPPED_TRACES[0], "t.jsonl")
    Path("empty").mkdir()
    try:
        status = main(words.split())
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    error = capsys.readouterr().err
    assert (status, error.count("\n")) == (2, 1), error
    assert message in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "t.jsonl"]
