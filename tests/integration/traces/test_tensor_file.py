"""The file of full values: its name, its forms, untrusted contents, and inputs read from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from example_trace import RECORDS, write
from hypothesis import given
from hypothesis import strategies as st

from opgrip.capture import Capture
from opgrip.replay.cases.cases import make_cases
from opgrip.traces import TraceReader, UserError, load, read
from opgrip.traces.io.tensor_file import TensorFile, from_stored, load_safetensors, to_stored, values_path
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.arguments import DTYPES
from opgrip.traces.schema.records import Header, Values
from opgrip.traces.values.exact import Booleans

KNOWN = sorted(
    name
    for name, dtype in DTYPES.items()
    if (dtype.is_floating_point or dtype.is_complex or "int" in name or name == "bool")
    and not name.startswith(("q", "float4"))
    and not any(name == f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
)


def headed(path: Path, fields: dict[str, Any]) -> Path:
    with TraceWriter(path, Header(fields)):
        pass
    return path


@pytest.mark.parametrize(
    ("trace", "values"),
    [
        ("step.jsonl", "step.values.safetensors"),
        ("step.jsonl.gz", "step.values.safetensors"),
        ("step.jsonl.zst", "step.values.safetensors"),
        ("step.rank1.jsonl", "step.rank1.values.safetensors"),
    ],
)
def test_values_file_is_named_after_its_trace(tmp_path: Path, trace: str, values: str) -> None:
    assert values_path(tmp_path / trace) == tmp_path / values


@given(st.sampled_from(KNOWN), st.binary(min_size=16, max_size=160))
def test_values_of_every_dtype_are_restored_bit_for_bit(name: str, content: bytes) -> None:
    dtype = DTYPES[name]
    content = bytes(byte % 2 for byte in content) if dtype == torch.bool else content
    flat = torch.frombuffer(bytearray(content[: len(content) // 16 * 16]), dtype=torch.uint8).view(dtype)
    found = from_stored(to_stored(flat), dtype)
    assert found is not None
    assert found.dtype == dtype
    assert found.view(torch.uint8).tolist() == flat.view(torch.uint8).tolist()


def test_nonzero_bytes_of_an_untrusted_file_become_true() -> None:
    found = from_stored(torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool), torch.bool)
    assert found is not None
    assert found.view(torch.uint8).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(torch.float32, torch.float64), (torch.int32, torch.complex64), (torch.uint8, torch.complex64)],
)
def test_values_of_another_dtype_are_not_used(stored: torch.dtype, dtype: torch.dtype) -> None:
    assert from_stored(torch.ones(3, dtype=stored), dtype) is None


@pytest.mark.parametrize("name", ["../t.safetensors", "/etc/passwd", "a/b", "a/", "..", ".", "", 7.5, ["x"]])
def test_header_may_only_name_a_values_file_in_the_same_folder(tmp_path: Path, name: Any) -> None:
    path = headed(tmp_path / "t.jsonl", {"values_file": name})
    if isinstance(name, str):
        with pytest.raises(UserError, match="the values must be in a file in the same folder"):
            load(path)
    else:
        assert load(path).tensor_files == ()


@pytest.mark.parametrize("name", ["no\0name", "\ud800", "x" * 5000, "folder"])
def test_impossible_values_file_name_is_ignored(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    assert load(headed(tmp_path / "t.jsonl", {"values_file": name})).tensor_files == ()


def test_values_file_is_found_through_links(tmp_path: Path) -> None:
    for folder in ("runs", "links", "store"):
        (tmp_path / folder).mkdir()
    trace = headed(tmp_path / "runs" / "t.jsonl", {"values_file": "t.values.safetensors"})
    values = tmp_path / "runs" / "t.values.safetensors"
    values.touch()
    (tmp_path / "latest.jsonl").symlink_to(trace)
    assert load(tmp_path / "latest.jsonl").tensor_files == (values,)
    stored = [path.rename(tmp_path / "store" / str(number)) for number, path in enumerate((trace, values))]
    for name, path in zip(("t.jsonl", "t.values.safetensors"), stored, strict=True):
        (tmp_path / "links" / name).symlink_to(path)
    assert load(tmp_path / "links" / "t.jsonl").tensor_files == (tmp_path / "links" / "t.values.safetensors",)


@pytest.mark.parametrize("key", ["", "../x", "0" * 31, "G" * 32, "0" * 129, 7, ["0" * 32]])
def test_key_that_is_not_a_hash_is_damage(tmp_path: Path, key: Any) -> None:
    path = write(tmp_path / "t.jsonl")
    form = {"type": "values", "id": 9, "model": "booleans", "true": 1, "total": 2, "tensor": key}
    path.write_text(path.read_text(encoding="utf-8") + json.dumps(form) + "\n", encoding="utf-8")
    reader = TraceReader(path)
    list(reader)
    assert reader.missing is not None
    assert "damaged" in reader.missing


def test_tensor_key_survives_writing_and_reading(tmp_path: Path) -> None:
    record = Values(9, Booleans(1, 2), "0123456789abcdef" * 2)
    path = write(tmp_path / "t.jsonl", [*RECORDS, record])
    assert record in read(path)
    assert load(path).tensors == {9: record.tensor}


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\xff" * 100, b"\x02" + b"\0" * 7 + b"{]"])
def test_foreign_values_file_is_reported_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(UserError, match="is not a file of safetensors"):
        TensorFile(tmp_path / "t").keys()


def test_values_at_any_offset_are_read(tmp_path: Path) -> None:
    forms = {"a": ("U8", 3, 0, 3), "b": ("F64", 2, 3, 19), "c": ("U8", 16, 19, 35)}
    header = {
        key: {"dtype": dtype, "shape": [count], "data_offsets": [start, end]}
        for key, (dtype, count, start, end) in forms.items()
    }
    text = json.dumps(header).encode()
    numbers = torch.tensor([1.5, 2.5, 3.5, 4.5], dtype=torch.float64)
    content = b"abc" + bytes(numbers.view(torch.uint8).tolist())
    (tmp_path / "t").write_bytes(len(text).to_bytes(8, "little") + text + content)
    file = TensorFile(tmp_path / "t")
    found = [file.read("b"), from_stored(file.read("c"), torch.float64), from_stored(file.read("c"), torch.complex128)]
    assert found[0].tolist() == [1.5, 2.5]
    assert found[1] is None
    assert found[2] is not None
    assert found[2].tolist() == [3.5 + 4.5j]
    assert all(item.data_ptr() % 16 == 0 for item in found if item is not None)


VALUES = torch.linspace(0, 10, 100).sin()  # values that no value model represents exactly


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Capture(tmp_path / "t.jsonl", values="full"):
        VALUES.sin()
    return tmp_path


def drawn(folder: Path, shape: tuple[int, ...] = (100,), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    (case,) = make_cases(load(folder / "t.jsonl"))
    (values,) = case.values.values()
    return values.draw(shape, dtype, torch.Generator().manual_seed(0))


def test_complete_file_returns_the_values_of_the_program(folder: Path) -> None:
    assert torch.equal(drawn(folder), VALUES)
    assert torch.equal(drawn(folder, (5, 20)), VALUES.reshape(5, 20))


@pytest.mark.parametrize(("shape", "dtype"), [((99,), torch.float32), ((100,), torch.float64), ((100,), torch.int32)])
def test_other_shapes_and_dtypes_are_drawn_from_the_model(
    folder: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    found = drawn(folder, shape, dtype)
    assert (found.shape, found.dtype) == (shape, dtype)
    assert not torch.equal(found.double(), VALUES[: len(found)].double())


def write_nothing(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replace(path: Path) -> None:
    load_safetensors().torch.save_file({"0" * 32: torch.ones(100)}, path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (Path.unlink, "their file is not next to the trace"),
        (write_nothing, "is not a file of safetensors"),
        (cut, "is not a file of safetensors"),
        (replace, "the file next to the trace does not contain them"),
    ],
)
def test_corrupt_values_file_is_reported_and_models_are_used(
    folder: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(folder / "t.values.safetensors")
    with pytest.warns(RuntimeWarning, match=f"1 of 1 recorded tensors are replaced by generated values: .*{message}"):
        found = drawn(folder)
    assert found.shape == (100,)
    assert not torch.equal(found, VALUES)
