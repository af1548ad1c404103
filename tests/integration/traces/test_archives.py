"""Tests of reading files in archives, and of archives that are hostile."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest
from example_trace import write
from programs import refusal, succeed

from opgrip.errors import UserError
from opgrip.traces import load
from opgrip.traces.io import archives

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
