"""Tests of inputs with captured values, read from a file that is untrusted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from opgrip.capture import Capture
from opgrip.replay.cases.cases import make_cases
from opgrip.traces import load
from opgrip.traces.io.tensor_file import load_safetensors

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
