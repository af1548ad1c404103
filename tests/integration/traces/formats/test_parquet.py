"""Tests of traces as Parquet files."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
import pytest
from changed_bytes import with_required_column
from google.protobuf.internal import encoder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_ranks import make_rank
from optional import optional
from programs import SHIPPED_TRACES, refusal, run_command, succeed
from pyarrow import parquet

from opgrip.errors import UserError
from opgrip.traces import TraceReader, load
from opgrip.traces.analysis.merge import merge
from opgrip.traces.codec.record_forms import to_json
from opgrip.traces.formats.parquet_files import open_parquet
from opgrip.traces.io.foreign_files import ForeignFile, Losses, format_of, formats
from opgrip.traces.schema.records import Calls, End, Header, Record, Thread


def write(records: Iterable[Record], path: Path) -> Path:
    format_ = formats.get("parquet")
    assert format_ is not None
    assert format_.write_records is not None
    with path.open("wb") as file:
        format_.write_records(records, file, Losses())
    return path


def forms(records: Iterable[Record]) -> list[str]:
    return [json.dumps(to_json(record)) for record in records]


@pytest.mark.parametrize("path", SHIPPED_TRACES, ids=lambda path: path.name.partition(".")[0])
def test_records_survive_a_round_trip(path: Path, tmp_path: Path) -> None:
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
def test_blocks_of_every_form_survive_a_round_trip(records: list[Record], tmp_path: Path) -> None:
    assert forms(TraceReader(write(records, tmp_path / "t.parquet"))) == forms(records)


@st.composite
def blocks(draw: st.DrawFn) -> Calls:
    count = draw(st.integers(0, 5))
    times = st.integers(0, 1 << 50)

    def column(values: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(values, min_size=count, max_size=count))

    def perhaps(values: st.SearchStrategy[int]) -> list[int]:
        return column(values) if draw(st.booleans()) else []

    tensors = perhaps(st.integers(0, 3))
    storages = draw(st.lists(st.integers(-1, 3_000), min_size=sum(tensors), max_size=sum(tensors)))
    streams = perhaps(st.integers(0, 3))
    places = st.lists(st.tuples(st.integers(0, max(count - 1, 0)), st.integers(0, 9)), max_size=2 if count else 0)
    return Calls(
        *(draw(st.integers(0, 2)), column(st.integers(0, 9)), column(st.integers(0, 9)), column(times), column(times)),
        *(tensors, storages, draw(st.integers(-1, 3_000)), perhaps(st.integers(-1, 99)), draw(places)),
        *(streams if any(streams) else [], draw(places)),
    )


# each file is read by a child process
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(blocks(), st.builds(Thread, st.integers(0, 2), st.text(max_size=3))), max_size=20))
@pytest.mark.slow
def test_arbitrary_blocks_survive_a_round_trip(tmp_path: Path, records: list[Record]) -> None:
    whole = [BLOCKS[0], *records]
    assert forms(TraceReader(write(whole, tmp_path / "t.parquet"))) == forms(whole)


def test_calls_have_their_rank_and_step(tmp_path: Path) -> None:
    for rank in (3, 5):
        make_rank(tmp_path / f"t.rank{rank}.jsonl", rank, 8, 40, every=10)
    merge([tmp_path / f"t.rank{rank}.jsonl" for rank in (3, 5)], tmp_path / "all.jsonl")
    table = pd.read_parquet(write(TraceReader(tmp_path / "all.jsonl"), tmp_path / "t.parquet"))
    assert table.groupby("process")["rank"].unique().map(list).to_dict() == {0: [3], 1: [5]}
    # each step begins with its only collective; earlier calls belong to the first step
    assert table.groupby("rank")["step"].value_counts().to_dict() == {
        **{(rank, 0): 19 for rank in (3, 5)},
        **{(rank, step): 10 for rank in (3, 5) for step in (1, 2)},
        **{(rank, 3): 1 for rank in (3, 5)},
    }
    assert table["storages"].map(len).tolist() == [3] * 9 + [2] + table["storages"].map(len).tolist()[10:]
    assert table["line"].unique().tolist() == [7]


def test_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Read a file whose storages are among the records."""
    path = write(BLOCKS, tmp_path / "t.parquet")
    table = parquet.read_table(path)
    texts = table.column("records").to_pylist()
    old = '"tensors":[1,2],"storages":[4,0,1]'
    texts[0] = texts[0].replace('"tensors":true', old)
    table = table.drop_columns(["storages", "records"]).append_column("records", pyarrow.array(texts))
    parquet.write_table(table, path)
    assert old in texts[0]
    (first, *_) = (record for record in TraceReader(path) if isinstance(record, Calls))
    assert first == BLOCKS[1]


def test_pandas_reads_rows_as_calls(tmp_path: Path) -> None:
    calls = load(SHIPPED_TRACES[0]).calls
    table = pd.read_parquet(write(TraceReader(SHIPPED_TRACES[0]), tmp_path / "t.parquet"))
    assert len(table) == len(calls)
    table = table.sort_values("start_ns", kind="stable", ignore_index=True)
    for name in ("op", "module", "phase", "thread", "function"):
        assert table[name].tolist() == calls[name].tolist(), name
    assert table["duration_ns"].tolist() == calls["duration_ns"].tolist()
    assert table["arguments"].str.contains("float32[", regex=False).any()


@pytest.mark.parametrize("package", ["duckdb", "polars"])
def test_other_tools_compute_equal_sums_of_times(package: str, tmp_path: Path) -> None:
    tool = optional(package)
    path = write(TraceReader(SHIPPED_TRACES[0]), tmp_path / "t.parquet")
    expected = load(SHIPPED_TRACES[0]).calls.groupby("op", observed=True)["duration_ns"].sum().to_dict()
    if package == "duckdb":
        rows = tool.sql(f"select op, sum(duration_ns)::bigint from '{path}' group by op").fetchall()
    else:
        rows = tool.read_parquet(path).group_by("op").agg(tool.col("duration_ns").sum()).rows()
    assert dict(rows) == expected


@pytest.mark.slow
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


@pytest.mark.slow
def test_commands_accept_parquet(tmp_path: Path) -> None:
    done = run_command("opgrip", "trace", "convert", "trace:faster_rcnn", "t.parquet", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "opgrip trace convert: wrote t.parquet\n")
    outputs = [
        run_command("opgrip", "trace", "info", name, cwd=tmp_path).stdout for name in ("t.parquet", "trace:faster_rcnn")
    ]
    assert outputs[0] == outputs[1]
    succeed("opgrip", "trace", "convert", "t.parquet", "t.jsonl", cwd=tmp_path)
    assert forms(TraceReader(tmp_path / "t.jsonl")) == forms(TraceReader("trace:faster_rcnn"))


def test_cut_trace_is_not_written_without_partial(tmp_path: Path) -> None:
    lines = json.dumps({"type": "header", "format": "opgrip-trace", "version": "1.5"})
    (tmp_path / "cut.jsonl").write_text(f"{lines}\n")
    assert "--partial" in refusal("opgrip", "trace", "convert", "cut.jsonl", "t.parquet", cwd=tmp_path)
    assert not (tmp_path / "t.parquet").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"records": None}, "no record of the type calls"),
        ({"records": "nonsense"}, "cannot be read"),
        ({"start_ns": None}, "has no start_ns"),
        ({"signature": None}, "has no signature"),
        ({"duration_ns": -5}, "negative duration"),
    ],
)
def test_inconsistent_columns_are_refused(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    table = parquet.read_table(write(BLOCKS, tmp_path / "t.parquet"))
    for name, value in change.items():
        values = [value, *table.column(name).to_pylist()[1:]]
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name), pyarrow.array(values, table.schema.field(name).type))
    parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(UserError, match=reason):
        list(TraceReader(tmp_path / "t.parquet"))


def test_file_that_repeats_one_row_is_refused(tmp_path: Path) -> None:
    table = parquet.read_table(write(BLOCKS, tmp_path / "t.parquet"))
    text = pyarrow.array(["x" * (1 << 19)] * 200).dictionary_encode()
    same = {name: pyarrow.nulls(200, table.schema.field(name).type) for name in table.column_names if name != "records"}
    columns = pyarrow.table({**same, "records": text}).select(table.column_names)
    parquet.write_table(columns.replace_schema_metadata(table.schema.metadata), tmp_path / "t.parquet")
    assert (tmp_path / "t.parquet").stat().st_size < 1 << 20
    with pytest.raises(UserError, match="texts of"):
        list(TraceReader(tmp_path / "t.parquet"))


def test_text_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    path = write(BLOCKS, tmp_path / "t.parquet")
    table = parquet.read_table(path)
    place = table.schema.get_field_index("records")
    texts = pyarrow.array([b"\x81", *[None] * (table.num_rows - 1)], pyarrow.binary()).cast(
        pyarrow.string(), safe=False
    )
    parquet.write_table(table.set_column(place, table.schema.field(place), texts), path)
    with pytest.raises(UserError, match=r"t\.parquet cannot be read"):
        list(TraceReader(path))


def read_records(path: Path, rows: int = 10, batch_texts: int = 1 << 20, **settings: Any) -> int:
    """Return the number of rows of a file with one text column."""
    file = ForeignFile(path, **settings)
    with open_parquet(file, {"record": "string"}, rows=rows, batch_texts=batch_texts) as content:
        return sum(1 for _ in content.records())


def test_large_text_counts_in_each_row_that_refers_to_it(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2000), pyarrow.array(["x" * (1 << 14)]))
    parquet.write_table(pyarrow.table({"record": texts}), path)
    assert path.stat().st_size < 1 << 16
    with pytest.raises(UserError, match="the texts of its rows have more than"):
        read_records(path)
    assert read_records(path, unbounded=True) == 2000


def test_file_with_pages_larger_than_its_footer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pages.parquet"
    table = pyarrow.table({"record": pyarrow.array(["0" * (1 << 20)] * 40)})
    parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    column = parquet.ParquetFile(path).metadata.row_group(0).column(0)
    content = path.read_bytes()
    for size in {parquet.ParquetFile(path).metadata.row_group(0).total_byte_size, column.total_uncompressed_size}:
        number = encoder._VarintBytes(size << 1)
        assert number in content
        # same length, padded with bytes that add nothing to the number
        content = content.replace(number, b"\x80" * (len(number) - 1) + b"\x00")
    path.write_bytes(content)
    assert parquet.ParquetFile(path).metadata.row_group(0).total_byte_size == 0
    with pytest.raises(UserError, match="the texts of 10 rows have more than"):
        read_records(path)
    with pytest.raises(UserError, match="more than 8"):
        read_records(path, batch_texts=1 << 40)


def test_column_with_inconsistent_statistics_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "levels.parquet"
    parquet.write_table(pyarrow.table({"record": ["{}", None]}), path)
    # pyarrow's view of the column's metadata crashes the process without an exception
    path.write_bytes(with_required_column(path.read_bytes(), "record"))
    with pytest.raises(UserError, match="histogram size mismatch"):
        read_records(path)


@pytest.mark.slow
def test_page_beyond_the_memory_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    bomb = pyarrow.table({"record": pyarrow.array(["0" * (400 << 20)])})
    parquet.write_table(bomb, path, compression="zstd", use_dictionary=False, write_statistics=False)
    assert path.stat().st_size < 1 << 18
    with pytest.raises(
        UserError, match=r"refused \(reading the file takes more memory than is allowed for a file of this size\)"
    ):
        read_records(path)


def test_reader_closed_early_ends_its_child_process(tmp_path: Path) -> None:
    path = write(BLOCKS, tmp_path / "t.parquet")
    with open_parquet(ForeignFile(path), {"signature": "int64"}) as content:
        pass
    assert content.returncode is not None
