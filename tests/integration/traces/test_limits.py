"""Files in archives, and untrusted files that are bombs: one-line errors, while files of real programs are read."""

import gzip
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from example_trace import write
from google.protobuf.internal import encoder
from programs import refusal, run_python, succeed
from pyarrow import parquet

from opgrip.errors import FormatError
from opgrip.traces import TraceReader, UserError, load
from opgrip.traces.analysis.merge import merge
from opgrip.traces.io import archives
from opgrip.traces.io.parquet_file import TooLargeError, read_parquet_table
from opgrip.traces.schema.arguments import decode
from opgrip.traces.schema.json_values import ITEMS, LINE_BYTES, NESTING, RECORDS, UNKNOWN_NAMES, UNKNOWN_RECORDS
from opgrip.traces.schema.records import Calls, Record, Thread


def with_required_column(content: bytes, name: str) -> bytes:
    """Return the Parquet file `content` with column `name` declared without nulls, while its statistics count some."""
    # of the schema element: the column's repetition type and its name
    element = b"\x25\x02\x18" + bytes([len(name)]) + name.encode()
    assert content.count(element) == 1
    return content.replace(element, b"\x25\x00" + element[2:])


HEADER = b'{"type":"header","format":"opgrip-trace","version":"1.3"}\n'
MEGABYTE = b" " * (1 << 20)
PRIME = 2**61 - 1  # modulus of Python's hash of integers


def packed(path: Path, pieces: Iterable[bytes]) -> Path:
    with path.open("wb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as file:
                file.writelines(pieces)
        elif path.suffix == ".zst":
            with zstandard.ZstdCompressor().stream_writer(raw, closefd=False) as file:
                for piece in pieces:
                    file.write(piece)
        else:
            raw.writelines(pieces)
    return path


def of_argument(argument: Any) -> bytes:
    return json.dumps({"type": "signature", "id": 0, "kind": "operator", "op": "aten.x.y", "args": [argument]}).encode()


BOMBS = {
    "one line": ([HEADER, *[MEGABYTE] * 40], "a line is longer than 16 MB"),
    "no header": ([MEGABYTE] * 40, "a line is longer than 16 MB"),
    "values": ([HEADER, b'{"type":"zz","x":[', b"[]," * 4_000_000, b"[]]}\n"], "a line holds more than"),
    "records of no use": ([HEADER, b'{"type":"z"}\n' * (UNKNOWN_RECORDS + 1)], "have unknown types"),
    "records alike": ([HEADER, b'{"type":"thread","id":0,"name":""}\n' * 70_000], "to more than .* records"),
    "values in all": ([HEADER, *[b'{"type":"zz","x":[' + b"[]," * 9_999 + b"[]]}\n"] * 80], "to more than .* values"),
}


@pytest.mark.parametrize("suffix", [".gz", pytest.param(".zst", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", list(BOMBS))
def test_bomb_is_refused_in_one_line(tmp_path: Path, kind: str, suffix: str) -> None:
    pieces, message = BOMBS[kind]
    path = packed(tmp_path / f"bomb.jsonl{suffix}", pieces)
    with pytest.raises(UserError, match=message) as caught:
        load(path)
    assert "--unbounded" in str(caught.value)


def test_bomb_takes_little_memory(tmp_path: Path) -> None:
    path = packed(tmp_path / "bomb.jsonl.zst", [HEADER, *[MEGABYTE] * 600])
    limit = 200 << 20
    program = (
        "import resource, sys; from opgrip.traces import load, UserError\n"
        "used = int(open('/proc/self/statm').read().split()[5]) * resource.getpagesize()\n"
        f"resource.setrlimit(resource.RLIMIT_DATA, (used + {limit},) * 2)\n"
        "try: load(sys.argv[1])\n"
        "except UserError as error: print(error)\n"
    )
    done = run_python("-c", program, path)
    assert "a line is longer than 16 MB" in done.stdout, done.stderr


def test_unbounded_read_ignores_the_limits(tmp_path: Path) -> None:
    path = packed(tmp_path / "t.jsonl", [HEADER, b'{"type":"z"}\n' * (UNKNOWN_RECORDS + 1)])
    assert load(path, unbounded=True).unknown == {"z": UNKNOWN_RECORDS + 1}
    long = packed(tmp_path / "long.jsonl", [HEADER, b" " * LINE_BYTES, b'{"type":"z"}\n'])
    with pytest.raises(UserError, match="a line is longer"):
        load(long)
    assert load(long, unbounded=True).unknown == {"z": 1}


def test_well_compressing_trace_is_read(tmp_path: Path) -> None:
    numbers = [0] * 512
    blocks: list[Record] = [
        Calls(0, numbers, numbers, [1000 * block + number for number in range(512)], numbers) for block in range(400)
    ]
    path = write(tmp_path / "t.jsonl.gz", [Thread(0, "MainThread"), *blocks])
    assert len(load(path).calls) == 400 * 512
    assert RECORDS.of(0) > 400
    assert ITEMS.of(path.stat().st_size) > 400 * 512 * 4


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"tuple": [inner]}])
def test_arguments_nest_up_to_the_limit(tmp_path: Path, wrap: Any) -> None:
    inner: Any = 1
    while json.dumps(inner).count("[") + json.dumps(inner).count("{") < NESTING - 4:
        inner = wrap(inner)
    path = packed(tmp_path / "t.jsonl", [HEADER, of_argument(inner) + b"\n"])
    assert len(load(path).signatures) == 1
    copy = packed(tmp_path / "copy.jsonl", [HEADER, of_argument(inner) + b"\n"])
    merge([path, copy], tmp_path / "merged.jsonl", partial=True)
    for _ in range(8):
        inner = wrap(inner)
    reader = TraceReader(packed(tmp_path / "deep.jsonl", [HEADER, of_argument(inner) + b"\n"]))
    assert len(list(reader)) == 1
    assert f"nested more than {NESTING} levels deep" in str(reader.missing)


@pytest.mark.parametrize(
    "keys",
    [
        [number * PRIME for number in range(2_000)],
        [{"complex": [float(-1000003 * number), float(number)]} for number in range(2_000)],
    ],
)
@pytest.mark.parametrize("kind", ["set", "frozenset", "dict"])
def test_keys_with_colliding_hashes_are_refused(kind: str, keys: list[Any]) -> None:
    body = [[key, 0] for key in keys] if kind == "dict" else keys
    with pytest.raises(FormatError, match="have the same hash"):
        decode({kind: body})


def test_large_sets_are_read() -> None:
    numbers = list(range(-100_000, 100_000))
    assert decode({"set": numbers}) == set(numbers)
    assert len(decode({"dict": [[number / 7, number] for number in range(100_000)]})) == 100_000


def test_unknown_field_names_are_counted_up_to_a_limit(tmp_path: Path) -> None:
    fields = {f"field{number}": 0 for number in range(2 * UNKNOWN_NAMES)}
    line = json.dumps({"type": "thread", "id": 0, "name": "", **fields}).encode() + b"\n"
    unknown = load(packed(tmp_path / "t.jsonl", [HEADER, line])).unknown
    assert len(unknown) == UNKNOWN_NAMES + 1
    assert unknown["others"] == UNKNOWN_NAMES


def test_cut_zst_of_one_block_is_reported_as_cut(tmp_path: Path) -> None:
    whole = zstandard.ZstdCompressor().compress(HEADER * 1000)
    path = tmp_path / "t.jsonl.zst"
    path.write_bytes(whole[:-5])
    with pytest.raises(UserError, match="is cut before its first record"):
        load(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="is empty"):
        load(path)


def read_rows(path: Path, most_rows: int = 1 << 20, most_bytes: int = 8 << 20) -> list[str]:
    rows: list[str] = read_parquet_table(path, most_rows, most_bytes, ["record"])["record"].to_pylist()
    return rows


def test_rows_of_the_requested_columns_are_read(tmp_path: Path) -> None:
    table = pyarrow.table({"record": ["a", None, "a"], "other": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "t.parquet")
    assert read_rows(tmp_path / "t.parquet") == ["a", None, "a"]
    read = read_parquet_table(tmp_path / "t.parquet", 1, 1, is_limited=False)
    assert read.schema.names == ["record", "other"]
    with pytest.raises(TooLargeError, match="more than 2 rows"):
        read_rows(tmp_path / "t.parquet", most_rows=2)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(40) + b"PAR1"])
def test_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.parquet").write_bytes(content)
    with pytest.raises(FormatError):
        read_rows(tmp_path / "t.parquet")


def test_index_outside_its_dictionary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"record": [*"abcabcab"]}), path, compression="none")
    content = path.read_bytes()
    packed = bytes([3, 0b00100100, 0b01001001])  # a run of eight indices of two bits
    assert content.count(packed) == 1
    path.write_bytes(content.replace(packed, b"\x03\xff\xff"))
    with pytest.raises(FormatError, match="out of bounds"):
        read_rows(path)


def test_file_with_pages_larger_than_its_footer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pages.parquet"
    table = pyarrow.table({"record": pyarrow.array([f"{number}" + "0" * (1 << 20) for number in range(40)])})
    parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    column = parquet.ParquetFile(path).metadata.row_group(0).column(0)
    content = path.read_bytes()
    for size in {parquet.ParquetFile(path).metadata.row_group(0).total_byte_size, column.total_uncompressed_size}:
        number = encoder._VarintBytes(size << 1)
        assert number in content
        # same length, padded with bytes that add nothing to the number
        content = content.replace(number, b"\x80" * (len(number) - 1) + b"\x00")
    path.write_bytes(content)
    assert parquet.ParquetFile(path).metadata.row_group(0).total_byte_size == 0
    with pytest.raises(TooLargeError, match="more than 8 MB"):
        read_rows(path)


def test_column_with_inconsistent_statistics_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "levels.parquet"
    parquet.write_table(pyarrow.table({"record": ["{}", None]}), path)
    # pyarrow's view of the column's metadata crashes the process without an exception
    path.write_bytes(with_required_column(path.read_bytes(), "record"))
    with pytest.raises(FormatError, match="histogram size mismatch"):
        read_rows(path)


@pytest.mark.slow
def test_page_beyond_the_memory_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    bomb = pyarrow.table({"record": pyarrow.array(["0" * (400 << 20)])})
    parquet.write_table(bomb, path, compression="zstd", use_dictionary=False, write_statistics=False)
    assert path.stat().st_size < 1 << 18
    with pytest.raises(TooLargeError, match="takes more memory than is allowed for a file of this size"):
        read_rows(path)


def test_other_parquet_files_are_refused_with_advice(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"record": ["a"]}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match=r"not a trace, but a Parquet file without the columns op_name and args"):
        list(TraceReader(tmp_path / "t.parquet"))


INPUTS = b"Operator: aten.relu.default\ncnt: 3, ((T([8], f32),), {})\n"


def pack(path: Path, files: dict[str, bytes]) -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return path
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.tgz", "a.tar"])
def test_only_readable_file_of_an_archive_is_read(name: str, tmp_path: Path) -> None:
    path = pack(tmp_path / name, {"notes/readme.md": b"hello", "notes/inputs.txt": INPUTS})
    assert load(path).calls["op"].tolist() == ["aten.relu.default"] * 3


@pytest.mark.slow
def test_trace_in_an_archive_is_replayed(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl.gz").read_bytes()
    path = pack(tmp_path / "a.zip", {"run/t.jsonl.gz": trace})
    shown = succeed("opgrip", "trace", "info", path).stdout
    assert shown == succeed("opgrip", "trace", "info", tmp_path / "t.jsonl.gz").stdout
    assert "one case" in succeed("opreplay", pack(tmp_path / "b.tgz", {"inputs.txt": INPUTS}), "--list").stdout


def test_file_in_an_archive_is_selected_by_path(tmp_path: Path) -> None:
    other = INPUTS.replace(b"relu", b"abs")
    path = pack(tmp_path / "a.zip", {"x/one.txt": INPUTS, "x/two.txt": other, "x/notes.md": b"hello"})
    with pytest.raises(UserError, match=r"several readable files \(x/one.txt, x/two.txt\): name one: .*a.zip/x/one"):
        load(path)
    assert load(path / "x/two.txt").calls["op"].tolist() == ["aten.abs.default"] * 3
    with pytest.raises(UserError, match=r"a.zip contains no x/three.txt: it contains x/notes.md, x/one.txt"):
        load(path / "x/three.txt")
    with pytest.raises(UserError, match="contains no"):
        load(path / "x/../x/two.txt")


def test_archive_without_a_readable_file_is_refused_with_its_files(tmp_path: Path) -> None:
    path = pack(tmp_path / "a.tar.gz", {"notes.md": b"hello", "x.csv": b"M,N\n1,2\n"})
    assert "a.tar.gz contains no readable file (notes.md, x.csv)" in refusal("opreplay", path, in_one_line=True)
    with pytest.raises(UserError, match=r"empty.zip is an empty archive: create it again"):
        load(pack(tmp_path / "empty.zip", {}))


def test_nested_archives_are_read_down_to_a_depth(tmp_path: Path) -> None:
    name, content = "inputs.txt", INPUTS
    for depth in range(4):
        content = pack(tmp_path / f"{depth}.zip", {name: content}).read_bytes()
        name = f"{depth}.zip"
        if depth <= archives.MOST_NESTED:
            assert len(load(tmp_path / name).calls) == 3
    with pytest.raises(UserError, match="contains no readable file"):
        load(tmp_path / "3.zip")


def test_links_and_paths_that_lead_outside_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_bytes(INPUTS)
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name, kind, target in (
            ("link.txt", tarfile.SYMTYPE, str(tmp_path / "secret.txt")),
            ("hard.txt", tarfile.LNKTYPE, "../secret.txt"),
            ("folder", tarfile.SYMTYPE, str(tmp_path)),
            ("pipe", tarfile.FIFOTYPE, ""),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, target
            archive.addfile(entry)
        for name in (f"{tmp_path}/absolute.txt", "../up.txt", "folder/inside.txt", "inputs.txt"):
            entry = tarfile.TarInfo(name)
            entry.size = len(INPUTS)
            archive.addfile(entry, io.BytesIO(INPUTS))
    with pytest.raises(UserError, match=r"several readable files \(folder/inside.txt, inputs.txt\)"):
        load(path)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a.tar", "secret.txt"]
    packed = tmp_path / "a.zip"
    with zipfile.ZipFile(packed, "w") as archive_:
        link = zipfile.ZipInfo("link.txt")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive_.writestr(link, str(tmp_path / "secret.txt"))
        archive_.writestr("../up.txt", INPUTS)
        archive_.writestr(f"{tmp_path}/absolute.txt", INPUTS)
        archive_.writestr("inputs.txt", INPUTS)
    assert len(load(packed).calls) == 3
    assert not (tmp_path / "absolute.txt").exists()


def test_archive_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    megabytes = b"\0" * (40 << 20)
    for name in ("size.zip", "size.tar.gz"):
        with pytest.raises(UserError, match=r"is refused \(it contains more than \d+ MB\)"):
            load(pack(tmp_path / name, {"a.json": megabytes}))
    with pytest.raises(UserError, match="is refused"):
        load(pack(tmp_path / "nested.zip", {"a.zip": (tmp_path / "size.zip").read_bytes()}))
    monkeypatch.setattr(archives, "MOST_ENTRIES", 20)
    for name in ("count.zip", "count.tar"):
        with pytest.raises(UserError, match="it contains more than 20 files"):
            load(pack(tmp_path / name, {f"{number}.txt": b"" for number in range(21)}))
    monkeypatch.setattr(archives, "MOST_DIRECTORY", 100)
    with pytest.raises(UserError, match="it contains more than 20 files"):
        load(pack(tmp_path / "directory.zip", {f"{number}.txt": b"" for number in range(9)}))
    assert not list(temporary.iterdir())


def test_damaged_archives_are_reported_in_one_line(tmp_path: Path) -> None:
    whole = pack(tmp_path / "a.zip", {"inputs.txt": INPUTS * 50}).read_bytes()
    packed = pack(tmp_path / "a.tgz", {"inputs.txt": INPUTS * 50}).read_bytes()
    damaged = {
        "cut.zip": whole[:-9],
        "text.zip": b"hello",
        "flipped.zip": whole[:60] + bytes([whole[60] ^ 255]) + whole[61:],
        "cut.tgz": packed[: len(packed) // 2],
        "flipped.tgz": packed[:40] + bytes([packed[40] ^ 255]) + packed[41:],
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"{name} cannot be read \(") as caught:
            load(tmp_path / name)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_extraction_folder_is_private_and_removed_at_exit(tmp_path: Path) -> None:
    path = pack(tmp_path / "a.zip", {"inputs.txt": INPUTS})
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    program = (
        "import os, sys; from opgrip.traces import load\n"
        # a fork that was made before removes its own folder, a later one does not remove its parent's
        "if os.fork() == 0: load(sys.argv[1]); sys.exit()\n"
        "os.wait(); load(sys.argv[1]); load(sys.argv[1])\n"
        "if os.fork() == 0: sys.exit()\n"
        "os.wait()\n"
        "(folder,) = os.listdir(os.environ['TMPDIR'])\n"
        "print(oct(os.stat(os.path.join(os.environ['TMPDIR'], folder)).st_mode & 0o777))"
    )
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(
        [sys.executable, "-c", program, path], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0o700"
    assert not list(temporary.iterdir())
