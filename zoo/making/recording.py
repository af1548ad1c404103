"""What the file of a trace holds, as the manifest says it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.traces.zoo import Recording, ZooTrace

if TYPE_CHECKING:
    from opgrip.traces import Trace

BANDWIDTH = 1e10
"""Bytes a second: what a function is does not depend on it, only what it could save."""


def record_of(path: Path, trace: ZooTrace, step_ms: float) -> Recording:
    """The figures of a trace's file."""
    from opgrip.traces import load

    content = load(path)
    header, data = content.header, path.read_bytes()
    return Recording(
        versions=_versions(content, trace.library),
        machine=str(header["devices"].get(header.get("device"), header["devices"]["cpu"])),
        steps=int(header["steps"]),
        step_ms=step_ms,
        calls=len(content.own_calls),
        signatures=len(operator_signatures(content)),
        operators=len(operators_of(content)),
        longtail=len(longtail_functions([content])),
        size_bytes=len(data),
        sha256=sha256(data).hexdigest(),
    )


def operator_signatures(trace: Trace) -> list[str]:
    """The operator or extension function of each signature: gripped functions and marks stand for no work."""
    from opgrip.traces.schema.records import FUNCTION
    from opgrip.traces.table.profiler_labels import is_mark

    return [item.op for item in trace.signatures if item.kind != FUNCTION and not is_mark(item.op)]


def operators_of(trace: Trace) -> set[str]:
    """Distinct operators and extension functions."""
    return set(operator_signatures(trace))


def longtail_functions(traces: Iterable[Trace]) -> set[tuple[str, str]]:
    """File and name of each function that the finder of long-tail functions names."""
    from opgrip.traces.analysis.longtail import find_longtail

    return {(item.file, item.name) for item in find_longtail(traces, lambda trace: BANDWIDTH).functions}


def _versions(content: Trace, library: str) -> dict[str, str]:
    versions = {name: str(content.header[name]) for name in ("torch", "opgrip")}
    model = content.header.get("model")
    if isinstance(model, dict):
        versions |= {str(name): str(number) for name, number in (model.get("packages") or {}).items()}
    if library not in versions:
        # the models of a library that ships with opgrip have its version
        with suppress(PackageNotFoundError):
            versions[library] = version(library)
    return versions
