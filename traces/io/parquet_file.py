"""Reader of untrusted Parquet files in a child process, because a damaged file can crash pyarrow or fill the memory."""

from __future__ import annotations

import json
import mmap
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from opgrip.cli.command import own_python
from opgrip.cli.plugins import needed
from opgrip.errors import FormatError
from opgrip.platform.sandbox import how_it_ended

MAGIC = b"PAR1"
FOOTER_BYTES = 64 << 20
BATCH_ROWS = 1 << 14
TOO_LARGE = 3  # exit status of the child for a file that exceeds a limit
# memory limits in bytes for a small file and for any file, in addition to the memory of pyarrow itself
BASE_BYTES, MOST_BYTES = 256 << 20, 4 << 30
BASE_S = 60  # limit of processor time in seconds for a small file; each MB adds a second


class TooLargeError(FormatError):
    pass


def footer_of(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(size - 8, 0))
            end = file.read(8)
            length = int.from_bytes(end[:4], "little")
            if end[4:] != MAGIC or length > min(size - 8, FOOTER_BYTES):
                return b""
            file.seek(size - 8 - length)
            return file.read(length)
    except OSError:
        return b""


def read_parquet_table(
    path: Path, most_rows: int, most_bytes: int, columns: Sequence[str] | None = None, is_limited: bool = True
) -> Any:
    """Return the rows of a Parquet file as an Arrow table, with dictionary-encoded text columns.

    columns : names of columns to read if the file has them; None for all columns
    is_limited : False for a trusted file, to which no limit applies
    """
    arrow, ipc = needed("pyarrow"), needed("pyarrow.ipc")
    request = {
        "path": str(path.absolute()),
        "columns": columns,
        "most_rows": most_rows,
        "most_bytes": most_bytes,
        "is_limited": is_limited,
    }
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(
            own_python("opgrip.traces.io.parquet_file", json.dumps(request)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            # Arrow's own allocators reserve more than they use
            env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "OPENBLAS_NUM_THREADS": "1"},
        )
        if done.returncode:
            words = done.stderr.decode(errors="replace").splitlines() if done.returncode > 0 else []
            reason = words[-1][:300] if words else f"reading it failed: {how_it_ended(done.returncode)}"
            raise (TooLargeError if done.returncode == TOO_LARGE else FormatError)(reason)
        content = mmap.mmap(output.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return ipc.open_stream(arrow.py_buffer(content)).read_all()
    except (arrow.ArrowException, ValueError) as error:
        raise FormatError(f"{error}"[:200]) from error


def main(text: str) -> int:
    request = json.loads(text)
    try:
        import pyarrow.parquet  # noqa: F401  # import before setting the limits, which exclude its memory

        if request["is_limited"]:
            _set_limits(Path(request["path"]).stat().st_size)
        _write_stream(**request)
    except MemoryError:
        sys.stderr.write("reading the file takes more memory than is allowed for a file of this size")
        return TOO_LARGE
    except TooLargeError as error:
        sys.stderr.write(str(error))
        return TOO_LARGE
    except Exception as error:
        # pyarrow raises many types of errors for a damaged file, including C++ ones
        sys.stderr.write(" ".join(f"{error}".split())[:200] or type(error).__name__)
        return 1
    return 0


def _set_limits(file_bytes: int) -> None:
    with suppress(ValueError, OSError):
        _, _, _, _, _, data_pages, _ = map(int, Path("/proc/self/statm").read_text().split())
        limit_bytes = data_pages * resource.getpagesize() + min(BASE_BYTES + 4 * file_bytes, MOST_BYTES)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    with suppress(ValueError, OSError):
        limit_s = BASE_S + (file_bytes >> 20)
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))


def _write_stream(path: str, columns: list[str] | None, most_rows: int, most_bytes: int, is_limited: bool) -> None:
    import pyarrow
    from pyarrow import ipc, parquet

    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    # rows that are read ahead would stay in memory until the file ends
    schema = parquet.ParquetFile(path, pre_buffer=False).schema_arrow
    if len(set(schema.names)) < len(schema.names):
        raise ValueError("two columns of the file have the same name")
    names = [name for name in schema.names if columns is None or name in columns]
    # a text that many rows share is stored once
    texts = [name for name in names if str(schema.field(name).type) in ("string", "large_string")]
    file = parquet.ParquetFile(path, read_dictionary=texts, pre_buffer=False)
    fields = [file.schema_arrow.field(name) for name in names]
    rows, output = 0, sys.stdout.buffer
    with ipc.new_stream(output, pyarrow.schema(fields, file.schema_arrow.metadata)) as stream:
        for batch in file.iter_batches(BATCH_ROWS, columns=names, use_threads=False):
            batch.validate(full=True)  # a damaged file has indices outside its dictionaries
            rows += batch.num_rows
            stream.write_batch(batch)
            if is_limited and rows > most_rows:
                raise TooLargeError(f"the file has more than {most_rows:,} rows")
            if is_limited and output.tell() > most_bytes:
                raise TooLargeError(f"the file contains more than {most_bytes >> 20:,} MB")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
