"""Files written by other tools, which are not part of this project."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import ROOT

from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.traces import Trace
from opgrip.traces.io.foreign_files import Losses, formats
from opgrip.traces.schema.records import Signature

DATA = ROOT.parent / "shared" / "data"
CASES = ROOT.parent / "shared" / "cases"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="files of other tools are not next to this checkout")
needs_cases = pytest.mark.skipif(not CASES.is_dir(), reason="cases from the field are not next to this checkout")


def case_files(pattern: str) -> list[Path]:
    """Return the cases' files that match a pattern, sorted by name; empty if there are none."""
    return sorted((CASES / "files").glob(pattern))


def data_files(pattern: str) -> list[Path]:
    return sorted(DATA.glob(pattern))


def write_as(name: str, trace: Trace, path: Path) -> Losses:
    losses = Losses()
    format_ = formats.get(name)
    assert format_ is not None
    assert format_.write is not None
    with path.open("wb") as file:
        format_.write(trace, file, losses)
    return losses


def results_of(trace: Trace) -> Iterator[tuple[Signature, Any]]:
    for signature in trace.signatures:
        args, kwargs = Inputs(signature.args, signature.kwargs, trace.values, device_map("cpu", "cpu"), 0).make()
        yield signature, operator_of(signature)(*args, **kwargs)


def operator_of(signature: Signature) -> Any:
    namespace, name, overload = signature.op.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
