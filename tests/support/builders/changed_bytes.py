"""Files damaged by a faulty disk or an attacker."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from opgrip.errors import UserError
from opgrip.traces import TraceReader

PIECES = [b"[", b"]", b"{", b'"', b",", b"-1", b"1e999", b"9" * 40, b"null", b"\xff"]


def changed(content: bytes, data: st.DataObject) -> bytes:
    """Return the content with some of its bytes replaced, removed or repeated."""
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(len(content) - 1, 0)))
        length = data.draw(st.integers(0, 12))
        copied = st.just(content[place : place + 40])
        piece = data.draw(st.one_of(st.binary(max_size=6), st.sampled_from(PIECES), copied))
        content = content[:place] + piece + content[place + length :]
    return content


def with_required_column(content: bytes, name: str) -> bytes:
    """Return a Parquet file whose footer declares a column without nulls while its statistics count some."""
    # of the schema element: the column's repetition type and its name
    element = b"\x25\x02\x18" + bytes([len(name)]) + name.encode()
    assert content.count(element) == 1
    return content.replace(element, b"\x25\x00" + element[2:])


def read_or_refuse(path: Path, format_name: str) -> None:
    """Read a file to its end, and check that any error is a one-line message."""
    told = ""
    try:
        for _ in TraceReader(path, format_name=format_name):
            pass
    except UserError as error:
        told = str(error)
    assert "\n" not in told
