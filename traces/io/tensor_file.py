"""Full values of tensors, as flat arrays in a safetensors file next to a trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from os.path import isfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from opgrip.cli.output_files import open_input
from opgrip.errors import FormatError, UserError, one_line

HEADER_FIELD = "values_file"  # field of a trace's header that names the file

ALIGNMENT = 16  # alignment in bytes, sufficient for every dtype

# dtypes that all versions of safetensors support; values of other dtypes are stored as bytes
STORED_AS_THEY_ARE = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)

HEADER_BYTES = 4 << 20
TENSOR_BYTES = 256 << 20  # maximum number of bytes of the header, and of a tensor, in files of other tools


def values_path(trace: Path) -> Path:
    # a link is followed, as for the trace itself
    trace = trace.resolve()
    name = trace.name
    for suffix in (".gz", ".zst", ".jsonl"):
        name = name.removesuffix(suffix)
    return trace.with_name(f"{name}.values.safetensors")


def files_beside(trace: Path, header: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return the existing files with full values that a trace's header names; a merged trace can have several."""
    paths = []
    for name in dict.fromkeys(_names_in(header)):
        if name in ("", ".", "..") or Path(name).name != name:
            shown = repr(name)[:80]
            raise UserError(
                f"{trace} names {shown} as its file of values", "the values must be in a file in the same folder"
            )
        # covers a folder of links to files elsewhere, and a link to a trace elsewhere
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


def to_stored(flat: torch.Tensor) -> torch.Tensor:
    return flat if flat.dtype in STORED_AS_THEY_ARE else flat.view(torch.uint8)


def from_stored(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    if dtype in STORED_AS_THEY_ARE:
        if stored.dtype != dtype:
            return None
        # a byte of an untrusted file may be neither 0 nor 1, which is not a valid boolean
        return stored.view(torch.uint8) != 0 if dtype == torch.bool else stored
    if stored.dtype != torch.uint8 or stored.numel() % dtype.itemsize:
        return None
    return stored.view(dtype)


class TensorFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None

    def __reduce__(self) -> tuple[type[TensorFile], tuple[Path]]:
        return TensorFile, (self.path,)

    def keys(self) -> frozenset[str]:
        return frozenset(self._open().keys())

    def read(self, key: str) -> torch.Tensor:
        """Return the stored array (N,) on the CPU; writing into it does not change the file."""
        file = self._open()
        try:
            tensor: torch.Tensor = file.get_tensor(key)
        except Exception as error:
            raise UserError(f"the tensor {key} cannot be read from {self.path}", one_line(error)) from error
        flat = tensor.reshape(-1)
        # the file does not guarantee that a tensor is aligned for its dtype
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
    package = load_safetensors()
    try:
        with open_input(path) as file:
            if int.from_bytes(file.read(8), "little") > HEADER_BYTES:
                raise FormatError(f"the header of the file has more than {HEADER_BYTES:,} bytes")
        with package.safe_open(str(path), framework="pt") as tensors:
            # the package maps the file into memory and has checked the shape
            tensor: torch.Tensor = tensors.get_tensor(key)
    except OSError as error:
        raise FormatError(f"the file cannot be opened ({one_line(error)})") from error
    except package.SafetensorError as error:
        raise FormatError(f"the tensor {key[:60]!r} cannot be read ({one_line(error)})") from error
    if tensor.nbytes > TENSOR_BYTES:
        raise FormatError(f"the tensor {key[:60]!r} has more than {TENSOR_BYTES:,} bytes")
    # the file does not guarantee that a tensor is aligned for its dtype
    flat = tensor.reshape(-1).view(torch.uint8).clone()
    if tensor.dtype == torch.bool:
        # a byte of an untrusted file may be neither 0 nor 1, which is not a valid boolean; compared with numpy, because
        # torch would use several threads, after which a process hangs in its forks
        flat = torch.from_numpy(flat.numpy() != 0)
    return flat.view(tensor.dtype).reshape(tensor.shape)


def write_foreign_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    with path.open("xb") as file:
        file.write(load_safetensors().torch.save({key: tensor.contiguous() for key, tensor in tensors.items()}))


def load_safetensors() -> ModuleType:
    import safetensors.torch

    return safetensors
