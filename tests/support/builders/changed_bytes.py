"""Parquet files changed by an attacker."""

from __future__ import annotations


def with_required_column(content: bytes, name: str) -> bytes:
    """Return the Parquet file `content` with column `name` declared without nulls, while its statistics count some."""
    # of the schema element: the column's repetition type and its name
    element = b"\x25\x02\x18" + bytes([len(name)]) + name.encode()
    assert content.count(element) == 1
    return content.replace(element, b"\x25\x00" + element[2:])
