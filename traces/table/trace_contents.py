"""Records of a trace, collected while the trace is read."""

from __future__ import annotations

from typing import Any

from opgrip.traces.codec.call_blocks import CallBlock
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.io.tensor_file import files_beside
from opgrip.traces.schema.accelerator_records import (
    DeviceTimes,
    Graph,
    GraphTimes,
    Kernels,
    Wait,
)
from opgrip.traces.schema.records import (
    Context,
    Effects,
    End,
    Entered,
    Header,
    Observed,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
)
from opgrip.traces.table.accelerators import merge_facts
from opgrip.traces.table.call_source import CallSource
from opgrip.traces.table.call_table import (
    CallNames,
    all_storages,
    calls_table,
)
from opgrip.traces.table.step_starts import unfinished_calls


class TraceContents:
    """Collects the records of a trace while it is loaded, and turns them into the attributes of a `Trace`."""

    def __init__(self, source: CallSource) -> None:
        self._source = source
        self._entered: dict[int, list[Entered]] = {}
        self._fields: dict[str, Any] = {
            **{name: {} for name in ("header", "values", "tensors", "threads", "contexts", "observed", "effects")},
            **{name: [] for name in ("signatures", "scopes", "kernels", "waits")},
        }

    def add(self, record: Record | CallBlock) -> None:
        fields = self._fields
        match record:
            case CallBlock():
                self._source.add(record)
            case Header():
                fields["header"] = record.fields
            case Signature():
                fields["signatures"].append(record)
            case Scope():
                fields["scopes"].append(record)
            case Values():
                fields["values"][record.number] = record.model
                if record.tensor is not None:
                    fields["tensors"][record.number] = record.tensor
            case Thread():
                fields["threads"][record.number] = record
            case Entered():
                self._entered.setdefault(record.thread, []).append(record)
            case DeviceTimes():
                self._source.add_times(record)
            case Context():
                fields["contexts"][record.number] = record.settings
            case Observed():
                fields["observed"].setdefault(record.signature, []).append(record)
            case Graph() | GraphTimes():
                self._source.graphs.add(record)
            case Effects():
                fields["effects"][record.signature] = record
            case Kernels():
                fields["kernels"].append(record)
            case Wait():
                fields["waits"].append(record)
            case End():
                fields["end"] = record
                fields["header"] = _with_accelerators(fields["header"], record)

    def attributes(self, reader: TraceReader) -> dict[str, Any]:
        fields = self._fields
        names = CallNames(fields["signatures"], fields["scopes"], fields["threads"])
        self._source.weigh_graphs(fields["signatures"])
        return fields | {
            "calls": lambda: calls_table(self._source, names),
            "storages": lambda: all_storages(self._source),
            "unfinished": lambda: unfinished_calls(self._entered, self._source),
            "source": self._source,
            "missing": reader.missing,
            "unknown": dict(reader.unknown),
            "tensor_files": files_beside(reader.path, fields["header"]),
        }


def _with_accelerators(header: dict[str, Any], end: End) -> dict[str, Any]:
    # the closing record knows accelerators that the program first used after the header was written
    later = {"devices": end.devices, "accelerator": end.accelerator}
    present = {name: facts for name, facts in later.items() if facts}
    before = {name: header[name] for name in present if isinstance(header.get(name), dict)}
    return {**header, **merge_facts(before, present)} if present else header
