"""Child process that reads a Parquet file and writes its rows to standard output as an Arrow IPC stream.

pyarrow allocates any amount of memory that a file requests, and a damaged file can crash its process. Only this child
process is affected; its memory and processor time are limited. It reports an error as one line on standard error and
exit status 1. Exit status 3 means that memory ran out.
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

TOO_MUCH_MEMORY = 3  # exit status that means that memory ran out
# memory limits in bytes for a small file and for any file, in addition to the memory of pyarrow itself
BASE_BYTES, MOST_BYTES = 256 << 20, 4 << 30
BASE_S = 60  # limit of processor time in seconds for a small file; each MB adds a second


def main(text: str) -> int:
    """Write the requested rows and return the exit status.

    text : JSON with `path`, `columns` to read (null for all), `rows` per batch, and `is_limited`
    """
    request = json.loads(text)
    try:
        import pyarrow.parquet  # noqa: F401  # import before setting the limits, which exclude its memory

        if request["is_limited"]:
            _set_limits(Path(request["path"]).stat().st_size)
        _write(request["path"], request["columns"], request["rows"])
    except BrokenPipeError:
        return 1
    except MemoryError:
        return TOO_MUCH_MEMORY
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


def _write(path: str, columns: list[str] | None, rows: int) -> None:
    import pyarrow
    from pyarrow import ipc, parquet

    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    # rows that are read ahead would stay in memory until the file ends
    schema = parquet.ParquetFile(path, pre_buffer=False).schema_arrow
    if len(set(schema.names)) < len(schema.names):
        raise ValueError("two columns of the file have the same name")
    names = [name for name in schema.names if columns is None or name in columns]
    # store text that many rows share only once
    texts = [name for name in names if _is_text(pyarrow, schema.field(name).type)]
    file = parquet.ParquetFile(path, read_dictionary=texts, pre_buffer=False)
    fields = [file.schema_arrow.field(name) for name in names]
    with ipc.new_stream(sys.stdout.buffer, pyarrow.schema(fields, file.schema_arrow.metadata)) as stream:
        for batch in file.iter_batches(rows, columns=names, use_threads=False):
            stream.write_batch(batch)


def _is_text(pyarrow: Any, kind: Any) -> bool:
    return bool(pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
