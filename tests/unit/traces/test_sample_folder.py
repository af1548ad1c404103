"""Untrusted sample folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opgrip.errors import UserError
from opgrip.traces.io.sample_folder import open_sample

GOOD = {"name": "s", "entry": "f", "file": "code.py", "classes": {}, "source": {"module": "m", "qualname": "f"}}


def written(folder: Path, text: str) -> Path:
    (folder / "code.py").write_text("class A:\n    pass\n\ndef f(x):\n    return x\n")
    (folder / "code.txt").write_text("def f(x):\n    return x\n")
    (folder / "sample.json").write_text(text)
    return folder


def test_classes_are_named_as_in_the_calls(tmp_path: Path) -> None:
    sample = open_sample(written(tmp_path, json.dumps(GOOD | {"classes": {"m:A": "A"}})))
    assert sample.function(3) == 3
    assert sample.classes["m:A"] is sample.classes["A"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"file": "code.txt"}, "file as the name of a .py file"),
        ({"file": "/etc/code.py"}, "file as the name of a .py file"),
        ({"file": "../code.py"}, "file as the name of a .py file"),
        ({"file": "none.py"}, "FileNotFoundError"),
        ({"classes": []}, "classes as texts"),
        ({"classes": {"m:A": "Nope"}}, "has no attribute 'Nope'"),
        ({"entry": None}, "entry as a text"),
        ({"entry": "f.g.h"}, "AttributeError"),
        ({"source": []}, "source as an object"),
        ({"source": {}}, "KeyError"),
    ],
)
def test_field_of_another_type_is_reported_in_one_line(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        open_sample(written(tmp_path, json.dumps(GOOD | changes)))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["[" * 200_000, "[]", "5", ""])
def test_file_that_is_not_a_sample_is_reported_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="is not a sample"):
        open_sample(written(tmp_path, text))


def test_huge_sample_file_is_not_read(tmp_path: Path) -> None:
    written(tmp_path, json.dumps(GOOD))
    with (tmp_path / "sample.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="is larger than 1 MB"):
        open_sample(tmp_path)
