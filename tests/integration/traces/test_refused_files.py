"""Tests that the message about a refused file names its kind and a remedy, in one line."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from programs import refusal

from opgrip.errors import UserError
from opgrip.traces import load


def pickled() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2)}, buffer)
    return buffer.getvalue()


def exported() -> bytes:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(torch.nn.Linear(4, 4), (torch.ones(2, 4),)), buffer)
    return buffer.getvalue()


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.txt", "x")
    return buffer.getvalue()


def tarred() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return buffer.getvalue()


PROTOTXT = b'op_name: "nms"\ninput {\n  id: "input1"\n  shape: {\n    dims: 30\n  }\n}\n'
KINDS = {
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a git LFS pointer", "git lfs"),
    "utf-16": ('{"traceEvents": []}'.encode("utf-16"), "text in UTF-16", "iconv"),
    "utf-16 without mark": ('{"traceEvents": []}'.encode("utf-16-le"), "text in UTF-16", "iconv"),
    "byte order mark": (b'\xef\xbb\xbf{"traceEvents": []}', "byte order mark", "tail"),
    "sizes": (b"m,n,k,bias,dtype,outdtype\n64,256,5120,False,a,b\n", "a CSV table with the columns m, n, k", "aten.mm"),
    "sizes in tabs": (b"m\tn\tk\n64\t256\t5120\n", "a CSV table with the columns m, n, k", "aten.mm"),
    "table": (b"token,model_dim,act_type\n512,6144,Silu\n", "the columns token, model_dim, act_type", "--formats"),
    "prototxt": (PROTOTXT, "a prototxt", "opcapture"),
    "nvbench": (json.dumps({"meta": {"version": {"nvbench": {}}}}, indent=1).encode(), "nvbench", "opcapture"),
    "results": (json.dumps({"trace": "a", "trace_hash": "b"}, indent=1).encode(), "of opreplay", "results show"),
    "rows": (b"case,op,median_us\n0,aten.add,1.5\n", "a result of opreplay", "opgrip results show"),
    "lines": (
        b'{"id": 36, "name": "a"}\n{"id": 37, "name": "b"}\n',
        "JSON lines with the members id, name",
        "--formats",
    ),
    "object": (b'{"cases": [{"arg_type": "a", "M": [1]}]}', "JSON with the member cases", "--formats"),
    "list": (b'[{"m": 1, "n": 2}, {"m": 2}]', "a JSON list of objects with the members m, n", "--formats"),
    "pickle": (pickled(), "a pickle of torch.save, which is never read", "opcapture"),
    "program of torch.export": (exported(), "a program of torch.export", "opcapture --model FILE.pt2"),
    "zip": (zipped(), "a zip archive", ".zip"),
    "tar": (tarred(), "a tar archive", ".tar"),
    "7-zip": (b"7z\xbc\xaf\x27\x1c\0\4" + b"\0" * 40, "an archive of 7-Zip", "unpack"),
    "gzip": (gzip.compress(b"{}"), "compressed by gzip", ".gz"),
    "page": (b"\n<!DOCTYPE html>\n<html lang='en'>", "an HTML page", "download"),
    "database": (b"SQLite format 3\0" + b"\0" * 84, "an SQLite database", "opcapture"),
    "program": (b"#!/usr/bin/env python\nimport torch\n\nmodel = 1\n", "a Python program", "opcapture -- FILE"),
}


@pytest.mark.parametrize(("content", "what", "hint"), KINDS.values(), ids=KINDS)
def test_refused_file_is_described_by_its_kind(content: bytes, what: str, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load(path)
    assert caught.value.problem.startswith(f"{path} is not a trace, but ")
    assert what in caught.value.problem
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value)


def test_kind_of_a_compressed_file_is_that_of_its_content(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(KINDS["sizes"][0]))
    assert "a CSV table with the columns m, n, k, bias, dtype and 1 more" in refusal("opreplay", path, in_one_line=True)


@pytest.mark.parametrize(
    "content",
    [b"hello\n", b"Dear Ada, Bob and C.:\nsee below, yours\n", b"[1, 2]\n", b"[" * 100_000, b'{"type": "x"}\n'],
)
def test_file_of_an_unknown_kind_is_reported_as_not_a_trace(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"is not a trace \("):
        load(path)


@pytest.mark.parametrize("command", [("opreplay",), ("opgrip", "trace", "info")])
def test_sample_of_graphnet_is_refused_with_the_command_that_records_it(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    for name in ("model.py", "weight_meta.py"):
        (tmp_path / name).write_text("")
    assert f"opcapture --model {tmp_path}" in refusal(*command, tmp_path, in_one_line=True)
