"""Reading traces: whole, cut anywhere, damaged, of other origin or newer versions, and in blocks of calls."""

import errno
import gzip
import io
import json
import warnings
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from time import process_time
from typing import Any

import pytest
import torch
from example_trace import RECORDS, write
from hypothesis import given
from hypothesis import strategies as st
from programs import refusal

from opgrip.errors import FormatError, UserError
from opgrip.traces import TraceReader, load, read
from opgrip.traces.codec.call_blocks import block_of, parse_block, perturbed_flags, record_of
from opgrip.traces.codec.record_forms import from_json, to_json
from opgrip.traces.io.writer import TraceWriter, encode_line
from opgrip.traces.schema.records import NO_STORAGE, Calls, Dropped, Effects, End, Header, Record


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_records_survive_writing_and_reading(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"t.jsonl{suffix}")
    header, *records = read(path)
    assert isinstance(header, Header)
    assert header.fields["torch"] == "2.13.0"
    assert records == RECORDS


def test_trace_loads_as_a_table_in_start_order(tmp_path: Path) -> None:
    trace = load(write(tmp_path / "t.jsonl"))
    assert trace.calls["start_ns"].tolist() == [10, 50, 70, 90]
    assert trace.calls["op"].tolist() == ["aten.mul.Tensor"] * 3 + ["mmcv._ext:nms"]
    assert trace.calls["own_module"].tolist() == ["backbone.überconv", "", "", "backbone.überconv"]
    # backward calls count to the module whose forward call caused them
    assert trace.calls["module"].tolist() == ["backbone.überconv"] * 4
    assert trace.calls["phase"].tolist() == ["forward", "backward", "backward", "forward"]
    assert trace.calls["thread"].tolist() == ["MainThread", "MainThread", "autograd", "MainThread"]
    assert trace.missing is None
    assert trace.end is not None
    assert trace.end.dropped == [Dropped("aten.x", "ValueError: no", 2)]
    summary = trace.summary().set_index("op")
    # calls made by an extension function are counted separately
    assert summary.at["aten.mul.Tensor", "calls"] == 1
    assert summary["share"].sum() == pytest.approx(1)


@pytest.mark.parametrize("failing", ["write", "close"])
def test_unwritable_trace_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"), TraceWriter(tmp_path / "t.jsonl", Header({})) as writer:
        monkeypatch.setattr(writer, failing, fail)
        writer.write(RECORDS[0])
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_trace: Path) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    records = list(read(tiny_trace))
    files = {}
    for suffix in ("", ".gz", ".zst"):
        path = folder / f"t.jsonl{suffix}"
        assert isinstance(records[0], Header)
        with TraceWriter(path, records[0]) as writer:
            for number, record in enumerate(records[1:]):
                writer.write(record)
                if number % 7 == 0:
                    writer.flush()
        files[suffix] = path.read_bytes()
    return files


@pytest.mark.parametrize(
    "suffix", ["", pytest.param(".gz", marks=pytest.mark.slow), pytest.param(".zst", marks=pytest.mark.slow)]
)
@given(data=st.data())
def test_trace_cut_at_any_byte_loads_up_to_the_cut(
    tmp_path: Path, whole: dict[str, bytes], suffix: str, data: st.DataObject
) -> None:
    content = whole[suffix]
    cut = data.draw(st.integers(0, len(content) - 1))
    path = tmp_path / f"cut.jsonl{suffix}"
    path.write_bytes(content[:cut])
    lines = whole[""].split(b"\n")
    whole_records = content[:cut].count(b"\n") if suffix == "" else None
    reader = TraceReader(path)
    if cut <= len(lines[0]) and suffix == "" and not content[:cut].endswith(b"}"):
        with pytest.raises(UserError, match=r"is empty|is not a trace"):
            list(reader)
        return
    found = read_what_there_is(reader)
    if not found:
        return
    assert found == list(read_lines(tmp_path, lines[: len(found)]))
    if whole_records is not None:
        assert len(found) in (whole_records, whole_records + 1)
    if len(found) < len(lines) - 1:
        assert reader.missing is not None
        assert f"after record {len(found)}" in reader.missing
    trace = load(path)
    assert len(trace.calls) == sum(len(record.signature) for record in found if isinstance(record, Calls))


def read_what_there_is(reader: TraceReader) -> list[Record]:
    try:
        return list(reader)
    except UserError:
        assert reader.records == 0
        return []


def read_lines(folder: Path, lines: list[bytes]) -> list[Record]:
    path = folder / "lines.jsonl"
    path.write_bytes(b"\n".join(lines))
    return list(read(path))


def test_cut_compressed_trace_loads_up_to_the_last_flush(whole: dict[str, bytes], tmp_path: Path) -> None:
    for suffix in (".gz", ".zst"):
        path = tmp_path / f"cut.jsonl{suffix}"
        path.write_bytes(whole[suffix][:-40])
        assert len(list(read(path))) > 0.8 * whole[""].count(b"\n")


def test_damaged_line_ends_the_trace_and_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl")
    lines = path.read_bytes().split(b"\n")
    lines[4] = lines[4][:20] + b"\x00\xff" + lines[4][22:]
    path.write_bytes(b"\n".join(lines))
    reader = TraceReader(path)
    assert len(list(reader)) == 4
    assert reader.missing is not None
    assert "damaged after record 4" in reader.missing


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("duration_ns", [5, -1]),
        ("duration_ns", [2**63 - 1, 5]),
        ("duration_ns", [2**62 - 50, 2**62]),
        ("start_ns", 2**62),
        ("start_ns", -(2**62) - 1),
        ("after_ns", [0, 2**62]),
    ],
)
def test_impossible_call_times_are_damage(tmp_path: Path, field: str, value: Any) -> None:
    calls = {"type": "calls", "thread": 0, "signature": [0, 0], "scope": [0, 0]}
    times = {"start_ns": 10, "after_ns": [0, 80], "duration_ns": [5, 6]}
    header = {"type": "header", "format": "opgrip-trace", "version": "1.5"}
    for changed, blocks in ((times, 1), (times | {field: value}, 0)):
        path = tmp_path / "t.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in (header, calls | changed)))
        reader = TraceReader(path)
        assert len([record for record in reader if isinstance(record, Calls)]) == blocks
        assert reader.missing is not None
        assert ("damaged" in reader.missing) == (not blocks)


def test_overflowing_total_time_is_damage(tmp_path: Path) -> None:
    block = Calls(0, [0, 0], [0, 0], [0, 0], [2**61, 2**61])
    reader = TraceReader(write(tmp_path / "t.jsonl", [block, block]))
    assert len(list(reader)) == 2
    assert "took more ns in total" in str(reader.missing)


@pytest.mark.parametrize("record", [End(0, 0, -1), Effects(0, 0, -1)])
def test_negative_times_are_damage(record: Record) -> None:
    with pytest.raises(FormatError, match="expected an integer of at least 0, got '-1'"):
        from_json(to_json(record))


def test_missing_calls_are_reported(tmp_path: Path) -> None:
    reader = TraceReader(write(tmp_path / "t.jsonl", [record for record in RECORDS if not isinstance(record, Calls)]))
    list(reader)
    assert reader.missing is not None
    assert "it holds 0 of 4 calls" in reader.missing


def test_duplicate_calls_are_damage(tmp_path: Path) -> None:
    place, block = next((place, record) for place, record in enumerate(RECORDS) if isinstance(record, Calls))
    reader = TraceReader(write(tmp_path / "t.jsonl", [*RECORDS[:place], block, *RECORDS[place:]]))
    list(reader)
    assert f"it holds {4 + len(block.signature)} calls, but its closing record counts 4" in str(reader.missing)


@pytest.mark.parametrize("number", [-1, 10**6])
def test_calls_of_a_missing_signature_are_damage(tmp_path: Path, number: int) -> None:
    place, block = next((place, record) for place, record in enumerate(RECORDS) if isinstance(record, Calls))
    changed = replace(block, signature=[number, *block.signature[1:]])
    reader = TraceReader(write(tmp_path / "t.jsonl", [*RECORDS[:place], changed, *RECORDS[place + 1 :]]))
    list(reader)
    assert f"calls refer to the signature {number}, which it lacks" in str(reader.missing)


def test_joined_traces_are_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl")
    path.write_bytes(path.read_bytes() * 2)
    trace = load(path)
    assert trace.missing is not None
    assert "two traces were joined" in trace.missing
    assert len(trace.calls) == 4


def test_types_and_fields_of_later_versions_are_ignored_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[0] = lines[0].replace('"version":"1.0"', '"version":"1.7"')
    lines.insert(1, '{"type":"weather","sky":"blue"}')
    lines.insert(1, '{"type":"values","id":7,"model":"zipf","s":1.1}')
    lines[5] = lines[5][:-1] + ',"colour":"red"}'
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    trace = load(path)
    assert trace.missing is None
    assert len(trace.calls) == 4
    assert trace.unknown == {"weather": 1, "values": 1, "signature.colour": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello", "is not a trace"),
        (b"[1, 2]\n", "is not a trace"),
        (b'{"type":"signature","id":0}\n', "is not a trace"),
        (b'{"type":"header","format":"opgrip-trace","version":"2.0"}\n', "newer than the 1.x"),
        (b'{"type":"header","format":"opgrip-trace","version":"x"}\n', "is not a trace"),
        (b'{"type":"header","format":"opgr', "is not a trace"),
        (b"[" * 100_000, "is not a trace"),
    ],
)
def test_file_that_is_not_a_trace_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_joined_gzip_members_are_read_as_one(tmp_path: Path) -> None:
    content = write(tmp_path / "t.jsonl").read_bytes()
    half = content.index(b"\n", len(content) // 2) + 1
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(content[:half]) + gzip.compress(content[half:]))
    assert list(read(path)) == list(read(tmp_path / "t.jsonl"))


def test_file_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    writer = TraceWriter(path, Header({}))
    writer.write(RECORDS[0])
    writer.flush()
    assert not path.exists()
    (partial,) = tmp_path.glob("t.part*.jsonl")
    assert len(list(read(partial))) == 2
    with pytest.raises(UserError, match=f"but {partial} holds calls of a program that was killed: .* --partial"):
        load(path)
    writer.close()
    assert path.exists()
    assert not list(tmp_path.glob("t.part*"))


def test_cut_trace_loads_with_a_warning_unless_requested(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", RECORDS[:-1])
    with pytest.warns(UserWarning, match=r"t.jsonl is cut after record 16: only the records before that are loaded"):
        load(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(path, partial=True).missing is not None
    with pytest.raises(UserError, match=r"cut after record 16: load it with --partial"):
        load(path, partial=False)


def pickled() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2)}, buffer)
    return buffer.getvalue()


def exported() -> bytes:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(torch.nn.Linear(4, 4), (torch.ones(2, 4),)), buffer)
    return buffer.getvalue()


KINDS = {
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a git LFS pointer", "git lfs"),
    "utf-16": ('{"traceEvents": []}'.encode("utf-16"), "text in UTF-16", "iconv"),
    "byte order mark": (b'\xef\xbb\xbf{"traceEvents": []}', "byte order mark", "tail"),
    "sizes": (b"m,n,k,bias,dtype,outdtype\n64,256,5120,False,a,b\n", "a CSV table with the columns m, n, k", "aten.mm"),
    "batches": (b"B,m,n,k,scale\n4,64,256,5120,1\n", "a CSV table with the columns B, m, n, k, scale", "--formats"),
    "aicb": (
        b'comm_type,comm_group,comm_group_size,msg_size\nCommType.all_reduce,CommGroup.dp_group,4,"(1, 2)"\n',
        "a workload of aicb",
        "opcapture",
    ),
    "astra-sim": (
        b"HYBRID_TRANSFORMER model_parallel_NPU_group: 8 ep: 1\n12\n",
        "a workload of ASTRA-sim",
        "opcapture",
    ),
    "layers": (b"train_iter:10\nEmb:\n    time_gpu_max: 857\n", "a workload of aicb", "opcapture"),
    "nvbench": (json.dumps({"meta": {"version": {"nvbench": {}}}}, indent=1).encode(), "nvbench", "opcapture"),
    "results": (json.dumps({"trace": "a", "trace_hash": "b"}, indent=1).encode(), "of opreplay", "results show"),
    "rows": (b"case,op,median_us\n0,aten.add,1.5\n", "a result of opreplay", "opgrip results show"),
    "lines": (
        b'{"id": 36, "name": "a"}\n{"id": 37, "name": "b"}\n',
        "JSON lines with the members id, name",
        "--formats",
    ),
    "pickle": (pickled(), "a pickle of torch.save, which is never read", "opcapture"),
    "program of torch.export": (exported(), "a program of torch.export", "opcapture --model FILE.pt2"),
    "gzip": (gzip.compress(b"{}"), "compressed by gzip", ".gz"),
    "program": (b"#!/usr/bin/env python\nimport torch\n\nmodel = 1\n", "a Python program", "opcapture -- FILE"),
}


@pytest.mark.parametrize(("content", "what", "hint"), KINDS.values(), ids=KINDS)
def test_refused_file_is_described_by_its_kind(content: bytes, what: str, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load(path)
    assert caught.value.problem.startswith(f"{path} is not a trace, but ")
    assert what in caught.value.problem
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("command", [("opreplay",), ("opgrip", "trace", "info")])
def test_sample_of_graphnet_is_refused_with_the_command_that_records_it(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    for name in ("model.py", "weight_meta.py"):
        (tmp_path / name).write_text("")
    assert f"opcapture --model {tmp_path}" in refusal(*command, tmp_path, in_one_line=True)


def runs_of(calls: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, calls - 1), st.integers(0, 2 * calls) | st.just(10**30))


@st.composite
def records(draw: st.DrawFn) -> Calls:
    calls = draw(st.integers(1, 12))

    def column(values: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(values, min_size=calls, max_size=calls))

    small = st.integers(0, 3)
    tensors = column(small) if draw(st.booleans()) else []
    storages = st.just(NO_STORAGE) | st.integers(0, 5) | st.integers(0, 10**12)
    places = st.lists(st.tuples(st.integers(0, calls - 1), st.integers(0, 20)), max_size=3)
    return Calls(
        *(draw(small), column(small), column(st.integers(0, 300)), list(accumulate(column(st.integers(-9, 10**9))))),
        *(column(st.integers(0, 10**12)), tensors),
        draw(st.lists(storages, min_size=sum(tensors), max_size=sum(tensors))),
        newest=draw(st.integers(-1, 10**13)),
        device_ns=draw(st.just([]) | st.lists(st.integers(-1, 9), min_size=calls, max_size=calls)),
        page_faults=draw(places),
        streams=draw(st.just([]) | st.lists(st.integers(1, 9), min_size=calls, max_size=calls)),
        perturbed=draw(places),
        slow_memory=draw(places),
    )


@given(records())
def test_captured_block_is_parsed_directly(record: Calls) -> None:
    line = encode_line(record)[:-1]
    block = parse_block(line)
    assert block is not None
    assert record_of(block) == from_json(json.loads(line)) == record
    assert record_of(block_of(record)) == record


CHANGES = [b"", b"0", b"]", b'"', b"1e3", b" ", b"9" * 17, b"0", b"-0", b",,", b"\xff"]


@given(records(), st.data())
def test_changed_block_is_parsed_like_json_or_left_to_json(record: Calls, data: st.DataObject) -> None:
    line = encode_line(record)[:-1]
    place = data.draw(st.integers(0, len(line)))
    end = place + data.draw(st.integers(0, 3))
    changed = line[:place] + data.draw(st.sampled_from(CHANGES)) + line[end:]
    block = parse_block(changed)
    if block is not None:
        assert record_of(block) == from_json(json.loads(changed))


def test_invalid_json_is_not_parsed() -> None:
    line = encode_line(Calls(0, [1, 2], [3, 4], [5, 6], [7, 8], [1, 0], [9]))[:-1]
    assert parse_block(line) is not None
    refused = [
        (b'"duration_ns":[7,8]', b'"duration_ns":[7,-8]'),
        (b'"duration_ns":[7,8]', b'"duration_ns":[7]'),
        (b'"tensors":[1,0]', b'"tensors":[2,0]'),
        (b'"tensors":[1,0],"newest":-1,"storages":[10]', b'"newest":-1,"storages":0'),
        (b'"start_ns":5', b'"start_ns":4611686018427387904'),
        (b'"thread":0', b'"thread":9223372036854775808'),
        (b'"newest":-1', b'"newest":-1,"perturbed":[[2,1]]'),
    ]
    assert parse_block(line.replace(b'"calls",', b'"calls",0')) is None
    for before, after in refused:
        assert before in line
        changed = line.replace(before, after)
        assert parse_block(changed) is None
        with suppress(FormatError):
            raise AssertionError(from_json(json.loads(changed)))


def test_overflowing_tensor_counts_are_refused() -> None:
    count, each = 1846, 9998 * 10**12
    tensors = [each] * (count - 1)
    tensors.append(2**64 + 1 - sum(tensors))
    ones = [1] * count
    line = encode_line(Calls(0, ones, ones, ones, ones, tensors, [9]))[:-1]
    assert 0 <= tensors[-1] < 10**16
    assert parse_block(line) is None


@given(st.integers(1, 30).flatmap(lambda calls: st.tuples(st.just(calls), st.lists(runs_of(calls), max_size=8))))
def test_overlapping_perturbed_runs_mark_the_right_calls(block: tuple[int, list[tuple[int, int]]]) -> None:
    calls, runs = block
    expected = [any(place <= call < place + count for place, count in runs) for call in range(calls)]
    assert perturbed_flags(runs, calls).tolist() == expected


def test_hundred_thousand_overlapping_runs_are_cheap() -> None:
    calls = 100_000
    began = process_time()
    assert perturbed_flags([(0, 10**15)] * calls, calls).all()
    assert process_time() - began < 2
