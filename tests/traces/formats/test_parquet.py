"""Traces of ours as Parquet."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
import pyarrow
import pytest
from changed_bytes import changed, read_or_refuse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optional import optional
from programs import SHIPPED_TRACES, run_command
from pyarrow import parquet

from opgrip.traces import TraceReader, load
from opgrip.traces.errors import UserError
from opgrip.traces.foreign import ForeignFile, Losses, format_of, formats
from opgrip.traces.formats.nodes.wire import varint
from opgrip.traces.formats.parquet_files import open_parquet
from opgrip.traces.record_forms import to_json
from opgrip.traces.records import Calls, End, Header, Record, Thread


def write(records: Iterable[Record], path: Path) -> Path:
    format_ = formats.get("parquet")
    assert format_ is not None
    assert format_.write_records is not None
    with path.open("wb") as file:
        format_.write_records(iter(records), file, Losses())
    return path


def forms(records: Iterable[Record]) -> list[str]:
    return [json.dumps(to_json(record)) for record in records]


@pytest.mark.parametrize("path", SHIPPED_TRACES, ids=lambda path: path.name.partition(".")[0])
def test_a_trace_has_the_same_records_again(path: Path, tmp_path: Path) -> None:
    records = list(TraceReader(path))
    written = write(records, tmp_path / "t.parquet")
    assert format_of(written) == "parquet"
    assert forms(TraceReader(written)) == forms(records)


BLOCKS: list[Record] = [
    Header({"model": {"name": "m"}}),
    Calls(0, [0, 1], [0, 0], [5, 9], [1, 2], [1, 2], [7, 7, 8], 3, [4, -1], [(1, 2)], [0, 3], [(0, 1)]),
    Thread(1, "worker"),
    Calls(1, [0], [5], [-4], [0]),
    Calls(1, [], [], [], []),
    Thread(2, "last"),
]


@pytest.mark.parametrize(
    "records",
    [BLOCKS, BLOCKS[:1], [BLOCKS[0], BLOCKS[2], End(0, 0, 0)], [*BLOCKS, End(3, 2, 12, stopped="--max-calls")]],
    ids=["blocks", "header", "no calls", "end"],
)
def test_blocks_of_every_form_are_kept(records: list[Record], tmp_path: Path) -> None:
    assert forms(TraceReader(write(records, tmp_path / "t.parquet"))) == forms(records)


def test_rows_are_calls_for_pandas(tmp_path: Path) -> None:
    calls = load(SHIPPED_TRACES[0]).calls
    table = pd.read_parquet(write(TraceReader(SHIPPED_TRACES[0]), tmp_path / "t.parquet"))
    assert len(table) == len(calls)
    table = table.sort_values("start_ns", kind="stable", ignore_index=True)
    for name in ("op", "module", "phase", "thread", "function"):
        assert table[name].tolist() == calls[name].tolist(), name
    assert table["duration_ns"].tolist() == calls["duration_ns"].tolist()
    assert table["arguments"].str.contains("float32[", regex=False).any()


@pytest.mark.parametrize("package", ["duckdb", "polars"])
def test_other_tools_add_up_the_same_times(package: str, tmp_path: Path) -> None:
    tool = optional(package)
    path = write(TraceReader(SHIPPED_TRACES[0]), tmp_path / "t.parquet")
    expected = load(SHIPPED_TRACES[0]).calls.groupby("op", observed=True)["duration_ns"].sum().to_dict()
    if package == "duckdb":
        rows = tool.sql(f"select op, sum(duration_ns)::bigint from '{path}' group by op").fetchall()
    else:
        rows = tool.read_parquet(path).group_by("op").agg(tool.col("duration_ns").sum()).rows()
    assert dict(rows) == expected


def test_memory_does_not_grow_with_the_calls(tmp_path: Path) -> None:
    def records(blocks: int) -> Iterable[Record]:
        yield BLOCKS[0]
        for block in range(blocks):
            yield Calls(0, [0] * 4096, [0] * 4096, list(range(block, block + 4096)), [1] * 4096)

    def peak(blocks: int) -> int:
        path = write(records(blocks), tmp_path / f"{blocks}.parquet")
        tracemalloc.start()
        total = sum(len(record.signature) for record in TraceReader(path) if isinstance(record, Calls))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert total == blocks * 4096
        return most

    assert peak(20) < 2 * peak(5)


def test_commands_take_it(tmp_path: Path) -> None:
    done = run_command("opgrip", "trace", "convert", "trace:faster_rcnn", "t.parquet", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "opgrip trace convert: to t.parquet\n")
    told = [
        run_command("opgrip", "trace", "info", name, cwd=tmp_path).stdout for name in ("t.parquet", "trace:faster_rcnn")
    ]
    assert told[0] == told[1]
    done = run_command("opgrip", "trace", "convert", "t.parquet", "t.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert forms(TraceReader(tmp_path / "t.jsonl")) == forms(TraceReader("trace:faster_rcnn"))


def test_a_cut_trace_is_not_written_as_a_whole_one(tmp_path: Path) -> None:
    lines = json.dumps({"type": "header", "format": "opgrip-trace", "version": "1.5"})
    (tmp_path / "cut.jsonl").write_text(f"{lines}\n")
    done = run_command("opgrip", "trace", "convert", "cut.jsonl", "t.parquet", cwd=tmp_path)
    assert done.returncode == 2
    assert "--partial" in done.stderr
    assert not (tmp_path / "t.parquet").exists()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_file_is_read_or_refused_in_one_line(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(changed(write(BLOCKS, path).read_bytes(), data))
    read_or_refuse(path, "parquet")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"records": None}, "in no block"),
        ({"records": "nonsense"}, "cannot be read"),
        ({"start_ns": None}, "without a time"),
        ({"signature": None}, "whole number"),
        ({"duration_ns": -5}, "less than no time"),
    ],
)
def test_columns_that_do_not_go_together_are_refused(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    table = parquet.read_table(write(BLOCKS, tmp_path / "t.parquet"))
    for name, value in change.items():
        values = [value, *table.column(name).to_pylist()[1:]]
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name), pyarrow.array(values, table.schema.field(name).type))
    parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(UserError, match=reason):
        list(TraceReader(tmp_path / "t.parquet"))


def test_a_file_that_repeats_one_row_for_ever_is_refused(tmp_path: Path) -> None:
    table = parquet.read_table(write(BLOCKS, tmp_path / "t.parquet"))
    text = pyarrow.array(["x" * (1 << 19)] * 200).dictionary_encode()
    same = {name: pyarrow.nulls(200, table.schema.field(name).type) for name in table.column_names if name != "records"}
    columns = pyarrow.table({**same, "records": text}).select(table.column_names)
    parquet.write_table(columns.replace_schema_metadata(table.schema.metadata), tmp_path / "t.parquet")
    assert (tmp_path / "t.parquet").stat().st_size < 1 << 20
    with pytest.raises(UserError, match="texts of"):
        list(TraceReader(tmp_path / "t.parquet"))


def test_a_file_whose_pages_are_larger_than_its_footer_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pages.parquet"
    table = pyarrow.table({"record": pyarrow.array(["0" * (1 << 20)] * 256)})
    parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    column = parquet.ParquetFile(path).metadata.row_group(0).column(0)
    content = path.read_bytes()
    for size in {parquet.ParquetFile(path).metadata.row_group(0).total_byte_size, column.total_uncompressed_size}:
        number = varint(size << 1)
        assert number in content
        # the same length, by bytes that add nothing
        content = content.replace(number, b"\x80" * (len(number) - 1) + b"\x00")
    path.write_bytes(content)
    assert parquet.ParquetFile(path).metadata.row_group(0).total_byte_size == 0
    with pytest.raises(UserError, match="it holds more than"):
        list(rows_of_records(path))


def rows_of_records(path: Path) -> Iterable[object]:
    """What is read of a file that has one column of texts."""
    yield open_parquet(ForeignFile(path), {"record": "string"})
