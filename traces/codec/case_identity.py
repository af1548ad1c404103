"""What a case is in any trace: each numbers its signatures in an order of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from opgrip.traces.codec.record_forms import to_json
from opgrip.traces.schema.arguments import Opaque, encode, map_leaves, numbers_of, with_numbers
from opgrip.traces.schema.records import Signature

DIGITS = 6
"""Bytes of a key: of a million cases two have the same once in five hundred."""

OF_CONTEXT = ("autocast", "default_dtype", "deterministic")
"""Settings that decide what a call computes; others are the machine's, or are those of a replay."""


def key_of_case(signature: Signature, context: Mapping[str, Any]) -> str:
    """What cases have in common that call the same with arguments of the same shapes, dtypes and settings.

    Values do not matter, which two captures of a program draw differently.

    Parameters
    ----------
    context : the settings that it runs under, of which `OF_CONTEXT` count
    """
    arguments = (signature.args, signature.kwargs)
    args, kwargs = map_leaves(_told, with_numbers(arguments, [None] * len(numbers_of(arguments))))
    call = to_json(replace(signature, number=0, args=args, kwargs=kwargs, outputs=None, raised=None))
    identity = {"call": call, "context": {name: context.get(name) for name in OF_CONTEXT}}
    return blake2b(json.dumps(identity, sort_keys=True, default=str).encode(), digest_size=DIGITS).hexdigest()


def key_of_part(key: str, *places: str) -> str:
    """Return the key of those calls of a case that were made in some places of the program."""
    return blake2b(json.dumps([key, *places]).encode(), digest_size=DIGITS).hexdigest()


def _told(leaf: Any) -> Any:
    """An argument as a trace has it; of one that no trace can hold, its type."""
    try:
        encode(leaf)
    except TypeError:
        return Opaque(type(leaf).__qualname__)
    return leaf
