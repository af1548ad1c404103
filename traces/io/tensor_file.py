"""Whole tensors in a safetensors file beside a trace, by the keys that its records of values have.

The file holds values alone, each entry flat: shapes, strides and the dtypes that safetensors lacks are the trace's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from os.path import isfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from opgrip.errors import FormatError, UserError, one_line

HEADER_FIELD = "values_file"
"""The field of a trace's header that names the file."""

ALIGNMENT = 16
"""Bytes to whose multiples every dtype is aligned."""

STORED_AS_THEY_ARE = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)
"""The dtypes that every safetensors knows; others are stored as their bytes."""

HEADER_BYTES = 4 << 20
TENSOR_BYTES = 256 << 20
"""Sizes of the header, and of a tensor, up to which a file of other tools is read."""


def values_path(trace: Path) -> Path:
    """Where the whole values of a trace go: `step.values.safetensors` for `step.jsonl.gz`."""
    # where a link points to, as the trace itself
    trace = trace.resolve()
    name = trace.name
    for suffix in (".gz", ".zst", ".jsonl"):
        name = name.removesuffix(suffix)
    return trace.with_name(f"{name}.values.safetensors")


def files_beside(trace: Path, header: Mapping[str, Any]) -> tuple[Path, ...]:
    """The files that a trace's header names which are there; several for a merged trace.

    Raises
    ------
    UserError : where a name is more than that of a file in the trace's own folder
    """
    paths = []
    for name in dict.fromkeys(_names_in(header)):
        if not _is_plain(name):
            shown = repr(name)[:80]
            raise UserError(f"{trace} names {shown} as its values", "they may only be in a file beside it")
        # a folder of links to files that are elsewhere, and a link to a trace that is
        beside = (trace.parent / name, trace.resolve().parent / name)
        paths += [path for path in beside if isfile(path)][:1]
    return tuple(paths)


def _names_in(header: Mapping[str, Any]) -> Iterator[Any]:
    headers: deque[Any] = deque([header])
    while headers:
        fields = headers.popleft()
        if isinstance(fields, dict):
            if fields.get(HEADER_FIELD) is not None:
                yield str(fields[HEADER_FIELD])
            parts = fields.get("processes")
            headers += parts if isinstance(parts, list) else []


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and Path(name).name == name


def to_stored(flat: torch.Tensor) -> torch.Tensor:
    """Values as the file holds them: as they are, or their bytes.

    Parameters
    ----------
    flat : (N,), contiguous
    """
    return flat if flat.dtype in STORED_AS_THEY_ARE else flat.view(torch.uint8)


def from_stored(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The values of that dtype that `to_stored` gave this form; None where it did not."""
    if dtype in STORED_AS_THEY_ARE:
        if stored.dtype != dtype:
            return None
        # a byte of a stranger's file may be neither 0 nor 1, which is no boolean
        return stored.view(torch.uint8) != 0 if dtype == torch.bool else stored
    if stored.dtype != torch.uint8 or stored.numel() % dtype.itemsize:
        return None
    return stored.view(dtype)


class TensorFile:
    """A file of whole tensors, opened when it is first read from.

    It can be handed to another process, which opens it anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None

    def __reduce__(self) -> tuple[type[TensorFile], tuple[Path]]:
        return TensorFile, (self.path,)

    def keys(self) -> frozenset[str]:
        """The keys of all tensors.

        Raises
        ------
        UserError : if the file is not one of safetensors
        """
        return frozenset(self._open().keys())

    def read(self, key: str) -> torch.Tensor:
        """A tensor as the file holds it: (N,), contiguous, on the CPU. Its memory is the file's until it is touched.

        Raises
        ------
        UserError : where the file does not hold it, or cannot be read
        """
        file = self._open()
        try:
            tensor: torch.Tensor = file.get_tensor(key)
        except Exception as error:
            raise UserError(f"{self.path} cannot give the tensor {key}", one_line(error)) from error
        flat = tensor.reshape(-1)
        # nothing says that what the file holds begins where its dtype can
        return flat if flat.data_ptr() % ALIGNMENT == 0 else flat.view(torch.uint8).clone().view(flat.dtype)

    def _open(self) -> Any:
        if self._file is None:
            package = load_safetensors()
            try:
                self._file = package.safe_open(str(self.path), framework="pt")
            except Exception as error:
                raise UserError(f"{self.path} is not a file of safetensors", one_line(error)) from error
        return self._file


def read_foreign_tensor(path: Path, key: str) -> torch.Tensor:
    """Return a tensor of another tool's file.

    Raises
    ------
    FormatError : if the file cannot be opened, is not one of safetensors, does not hold the tensor, or is too large
    """
    package = load_safetensors()
    try:
        with path.open("rb") as file:
            if int.from_bytes(file.read(8), "little") > HEADER_BYTES:
                raise FormatError("its header is too long")
        with package.safe_open(str(path), framework="pt") as tensors:
            # it maps the file's memory, and has checked the shape
            tensor: torch.Tensor = tensors.get_tensor(key)
    except OSError as error:
        raise FormatError("it cannot be opened") from error
    except package.SafetensorError as error:
        raise FormatError(f"its tensor {key[:60]!r} cannot be read ({one_line(error)})") from error
    if tensor.nbytes > TENSOR_BYTES:
        raise FormatError(f"its tensor {key[:60]!r} is too large")
    # nothing says that it begins where its dtype can
    flat = tensor.reshape(-1).view(torch.uint8).clone()
    if tensor.dtype == torch.bool:
        # a byte of an untrusted file may be neither 0 nor 1, which is not a boolean; by numpy, as torch would do it in
        # several threads, after which a process hangs in its forks
        flat = torch.from_numpy(flat.numpy() != 0)
    return flat.view(tensor.dtype).reshape(tensor.shape)


def write_foreign_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a new file of tensors for another tool; `STORED_AS_THEY_ARE` has their dtypes."""
    with path.open("xb") as file:
        file.write(load_safetensors().torch.save({key: tensor.contiguous() for key, tensor in tensors.items()}))


def load_safetensors() -> ModuleType:
    """Import the package, which takes a while."""
    import safetensors.torch

    return safetensors
