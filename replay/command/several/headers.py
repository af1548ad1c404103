"""What results of several traces say of where they come from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from opgrip.traces.zoo.distilled import FIELD

OF_TRACE = ("trace", "trace_hash", FIELD)
"""Parts of a header that each trace has of its own."""


def common_header(headers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the results of all traces have in common, as the first of them says it."""
    return {name: value for name, value in next(iter(headers), {}).items() if name not in OF_TRACE}


def with_traces(words: str, common: Mapping[str, Any], traces: Mapping[str, Any]) -> dict[str, Any]:
    """The header of several traces.

    Parameters
    ----------
    words : that name the traces
    traces : by the name of a trace, what it is
    """
    hashes = json.dumps([hash_of(about) for about in traces.values()])
    whole = hashlib.blake2b(hashes.encode(), digest_size=16).hexdigest()
    return {"trace": words, **common, "trace_hash": whole, "traces": dict(traces)}


def with_earlier(header: Mapping[str, Any], earlier: Mapping[str, Any], replayed: Collection[str]) -> dict[str, Any]:
    """The header of rows that are added to those of a file.

    Parameters
    ----------
    earlier : the header of that file
    replayed : the traces whose rows are added; of others, what the file says of them stays
    """
    facts = earlier.get("traces", {})
    new = {name: about for name, about in header["traces"].items() if name in replayed or name not in facts}
    words = dict.fromkeys(filter(None, (earlier.get("trace"), header["trace"])))
    return with_traces(" ".join(words), common_header([header]), {**facts, **new})


def hash_of(about: Any) -> str | None:
    """The hash of a trace, of what a header says of it, which may be a stranger's."""
    return about.get("trace_hash") if isinstance(about, Mapping) else None
