"""Storage of all values of tensors in a separate file next to a trace."""

from __future__ import annotations

import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO

import torch

from opgrip.cli.output_files import abandon, check_writable, create, discard, partial_path
from opgrip.errors import UserError, one_line, raise_if_from_program
from opgrip.traces.io.tensor_file import ALIGNMENT, load_safetensors, to_stored, values_path
from opgrip.traces.values.model import array_of

# maximum number of tensors, because readers of safetensors accept a list of at most 100 MB, with about 110 bytes per
# tensor
MAX_TENSORS = 500_000


def check(trace: str | Path | None, force: bool) -> None:
    if trace is not None:
        check_writable(path_beside(trace), force)


def path_beside(trace: str | Path) -> Path:
    if str(trace) == "-":
        raise UserError(
            "full values are stored in a file next to the trace, but the trace goes to standard output",
            "name a file for the trace with --output",
        )
    return values_path(Path(trace))


@dataclass(frozen=True, slots=True)
class _Entry:
    start: int
    size: int
    dtype: torch.dtype


class FullValues:
    """The full values of one trace, in which equal contents are stored once."""

    def __init__(self, path: Path, force: bool = False, most_bytes: int | None = None) -> None:
        self.path = path
        self.bytes_written = 0
        self.over = False
        self.failure: Exception | None = None
        self._force = force
        self._most = most_bytes
        self._entries: dict[str, _Entry] = {}
        self._spool: IO[bytes] | None = None
        self._end = 0

    @property
    def tensors(self) -> int:
        return len(self._entries)

    def keep(self, tensor: torch.Tensor, op: str, lost: Counter[tuple[str, str]]) -> str | None:
        """Write a tensor's values unless equal ones are stored; return their key, or None if they are left out."""
        try:
            if self.failure is None:
                return self._keep(tensor.detach())
            error = self.failure
        except Exception as raised:
            raise_if_from_program(raised)
            # the traceback's frames would keep the tensor alive
            error = raised.with_traceback(None)
            if isinstance(error, OSError | UserError):
                # a full disk will not recover
                self.failure = error
        lost[op, f"full values: {one_line(error)}"] += 1
        return None

    def finish(self) -> None:
        try:
            self._assemble()
        except Exception as error:
            self.failure = self.failure or error
        self.discard()

    def discard(self) -> None:
        if self._spool is not None:
            with suppress(OSError):
                self._spool.close()
            discard(self._spool)

    def abandon(self) -> None:
        if self._spool is not None:
            abandon(self._spool)

    def _keep(self, tensor: torch.Tensor) -> str | None:
        flat = _in_memory(tensor).cpu().reshape(-1).contiguous()
        data = array_of(flat.view(torch.uint8)).data
        key = _key(tensor, data)
        if key not in self._entries:
            self.over = self.over or (self._most is not None and self.bytes_written + data.nbytes > self._most)
            if self.over:
                return None
            if self.tensors >= MAX_TENSORS:
                raise UserError(f"{self.path} cannot contain more than {MAX_TENSORS:,} tensors", "capture fewer steps")
            self._entries[key] = self._write(data, to_stored(flat).dtype)
            self.bytes_written += data.nbytes
        return key

    def _write(self, data: memoryview, dtype: torch.dtype) -> _Entry:
        spool = self._open_spool()
        # seek, because the last write may have failed partway
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        spool.seek(start)
        spool.write(data)
        # otherwise a forked child would have a part of it in its own buffer
        spool.flush()
        self._end = start + data.nbytes
        return _Entry(start, data.nbytes, dtype)

    def _open_spool(self) -> IO[bytes]:
        if self._spool is None:
            self._spool = create(self.path, self._force)
        return self._spool

    def _assemble(self) -> None:
        package = load_safetensors()
        spool = self._open_spool()
        spool.close()
        part = partial_path(self.path)
        try:
            package.torch.save_file(self._map_spool(Path(spool.name)), part, metadata={"format": "pt"})
            # safetensors creates files that only the owner can read
            shutil.copymode(spool.name, part)
            part.replace(self.path)
        finally:
            part.unlink(missing_ok=True)

    def _map_spool(self, spool: Path) -> dict[str, torch.Tensor]:
        size = spool.stat().st_size
        if not size:
            return {}
        whole = torch.from_file(str(spool), shared=False, size=size, dtype=torch.uint8)
        return {
            key: whole[entry.start : entry.start + entry.size].view(entry.dtype) for key, entry in self._entries.items()
        }


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_conj():
        tensor = tensor.conj()
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    # a mask that is expanded to a batch can be a thousand times larger than its memory
    for dimension in _find_repeated_dimensions(tensor):
        tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _find_repeated_dimensions(tensor: torch.Tensor) -> list[int]:
    return [
        dimension
        for dimension, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if step == 0 and size > 1
    ]


def _key(tensor: torch.Tensor, data: memoryview) -> str:
    repeated = _find_repeated_dimensions(tensor)
    form = f"{tensor.dtype} {[*tensor.shape, repeated] if repeated else ''}"
    content = blake2b(form.encode(), digest_size=16)
    content.update(data)
    return content.hexdigest()
