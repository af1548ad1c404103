"""Files as a faulty disk, or somebody who means harm, leaves them."""

from __future__ import annotations

from hypothesis import strategies as st


def changed(content: bytes, data: st.DataObject) -> bytes:
    """The content with some of its bytes replaced, removed or repeated."""
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(len(content) - 1, 0)))
        length = data.draw(st.integers(0, 12))
        piece = data.draw(
            st.one_of(
                st.binary(max_size=6),
                st.sampled_from([b"[", b"]", b"{", b'"', b",", b"-1", b"1e999", b"9" * 40, b"null", b"\xff"]),
                st.just(content[place : place + 40]),
            )
        )
        content = content[:place] + piece + content[place + length :]
    return content
