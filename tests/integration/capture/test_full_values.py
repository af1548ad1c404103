"""Full values: the program's exact values come back, and the file of the values is read safely."""

import errno
import json
import os
import pickle
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from example_trace import RECORDS, write
from hypothesis import given
from hypothesis import strategies as st
from programs import TinyNet, refusal, run_python, succeed
from small_models import lstm
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from versions import has_detached_views

from opgrip.capture import Capture
from opgrip.capture.signatures.full_values import FullValues
from opgrip.capture.signatures.signatures import tensors_in
from opgrip.capture.torch_compat.torch_private import without_functions, without_modes
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.traces import Trace, TraceReader, UserError, load, read
from opgrip.traces.analysis.merge import merge
from opgrip.traces.io.tensor_file import TensorFile, from_stored, load_safetensors, to_stored, values_path
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.arguments import DTYPES, tensors
from opgrip.traces.schema.records import Header, Values
from opgrip.traces.values.exact import Booleans

NETS = """
from pathlib import Path
import torch
from torch import nn

def net():
    Path("built").touch()
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(inplace=True), nn.Linear(32, 4)), torch.randn(5, 64)
"""


def snapshot(tensor: torch.Tensor) -> tuple[Any, ...]:
    memory = torch.tensor(list(tensor.untyped_storage()), dtype=torch.uint8)
    width = tensor.dtype.itemsize
    steps = (*(step * width for step in tensor.stride()), 1)
    elements = memory.as_strided((*tensor.shape, width), steps, tensor.storage_offset() * width) if len(memory) else []
    layout = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return *layout, torch.as_tensor(elements).tolist()


class Spy(TorchDispatchMode):
    """Mode that records the tensors of every call before it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[Any, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_modes(), without_functions():
            found = [snapshot(tensor) for tensor in tensors_in((*args, *(kwargs or {}).values()))]
        self.seen.append((str(func), found))
        return func(*args, **(kwargs or {}))


def capture(path: Path, function: Callable[[], object], **options: Any) -> Trace:
    with Capture(path, values="full", **options):
        function()
    return load(path, partial=False)


def lost(trace: Trace) -> set[str]:
    assert trace.end is not None
    return {item.op for item in trace.end.without_values}


def replayed(trace: Trace) -> dict[int, list[tuple[Any, ...]]]:
    found = {}
    for case in make_cases(trace):
        signature = case.signature
        if not list(tensors([signature.args, signature.kwargs])):
            continue
        args, kwargs = Inputs(signature.args, signature.kwargs, case.values, device_map("cpu", None), seed=0).make()
        found[case.number] = [snapshot(tensor) for tensor in tensors_in((*args, *kwargs.values()))]
    return found


def in_place() -> None:
    x = torch.randn(90)
    x.abs_().add_(1).add_(2).mul_(x)


def views() -> None:
    x = torch.randn(12, 10)
    x.t()[3:, ::2].sin()
    torch.add(x[1:, 1:], x[:-1, :-1])
    torch.randn(1, 90).expand(4, 90).contiguous()
    torch.randn(70, 1).expand(70, 3).neg()
    x.unfold(0, 5, 2).cos()
    x.as_strided((8, 9), (3, 1), 2).exp()
    torch.randn(80).flip(0)[1:].view(torch.int32).abs()


def half_precision() -> None:
    odd = torch.arange(0, 1 << 16, 131).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        odd.view(dtype).neg()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        odd.view(dtype)[1:].to(torch.float32)


def whole_numbers() -> None:
    numbers = torch.randint(-(1 << 62), 1 << 62, (100,))
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64):
        numbers.to(dtype).clone()


def booleans() -> None:
    mask = torch.randn(9, 11) > 0.5
    mask.nonzero()
    (mask & mask.flip(0)).all()


def complex_numbers() -> None:
    z = torch.randn(100, dtype=torch.complex64)
    (z.conj() * 2).abs()
    z.to(torch.complex128).conj()[::3].sin()
    torch._neg_view(z.imag).exp()
    z.conj().imag.cos()


def special_floats() -> None:
    bits = torch.tensor([0x7FC01234, -0x7F, 0x7F800000, 0x00000001, -0x80000000] * 20, dtype=torch.int32)
    bits.view(torch.float32).clone()
    bits[:5].view(torch.float32).clone()


def lists_and_empties() -> None:
    parts = [torch.randn(size, 3) for size in (0, 1, 30)]
    torch.cat(parts)
    torch.empty(0).sum()
    torch.tensor(2.5).mul(torch.randn(3))


def training() -> None:
    model = TinyNet()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(
            model(torch.randn(2, 3, 8, 8), torch.ones(2, 6).long()), torch.tensor([1, 4])
        ).backward()
        optimizer.step()


PROGRAMS = [
    *(in_place, views, half_precision, whole_numbers, booleans, complex_numbers, special_floats, lists_and_empties),
    training,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_replayed_arguments_equal_those_of_the_program_bit_for_bit(tmp_path: Path, program: Callable[[], None]) -> None:
    torch.manual_seed(0)
    spy = Spy()

    def watched() -> None:
        with spy:
            program()

    trace = capture(tmp_path / "t.jsonl", watched)
    calls = list(zip(trace.calls["op"], map(int, trace.calls["signature"]), strict=True))
    seen: dict[int, list[tuple[Any, ...]]] = {}
    for op, found in spy.seen:
        # the capture mode is outside of the spy and sees further calls
        while has_detached_views() and calls[0][0] == "aten.detach.default" != op:
            calls.pop(0)
        name, number = calls.pop(0)
        assert name == op
        seen.setdefault(number, found)
    assert len(spy.seen) > 2
    assert {name for name, _ in calls} <= ({"aten.detach.default"} if has_detached_views() else set())
    again = {number: found for number, found in replayed(trace).items() if number in seen}
    assert again == {number: found for number, found in seen.items() if found}
    assert lost(trace) == set()


def test_sketched_values_differ_from_those_of_the_program(tmp_path: Path) -> None:
    x = torch.randn(100)
    with Capture(tmp_path / "t.jsonl"):
        x.sin()
    assert replayed(load(tmp_path / "t.jsonl")) != {0: [snapshot(x)]}
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def test_equal_contents_are_stored_once(tmp_path: Path) -> None:
    x = torch.randn(30, 40)
    trace = capture(tmp_path / "t.jsonl", lambda: (x.sin(), x.clone().cos(), x.reshape(1200).tan(), x.t().t().exp()))
    (path,) = trace.tensor_files
    assert len(TensorFile(path).keys()) == 2
    assert path.stat().st_size < 2 * x.nbytes + 2000


def test_equal_bytes_of_another_dtype_are_separate_values(tmp_path: Path) -> None:
    x = torch.randn(100)
    trace = capture(tmp_path / "t.jsonl", lambda: (x.abs(), x.view(torch.int32).abs()))
    assert len(set(trace.tensors.values())) == 2


@pytest.mark.slow
def test_program_with_full_values_runs_unchanged(tmp_path: Path) -> None:
    def steps() -> list[torch.Tensor]:
        torch.manual_seed(3)
        program = lstm()
        return [*(program.train() for _ in range(3)), *program.model.parameters(), torch.rand(4)]

    unwatched = steps()
    with Capture(tmp_path / "t.jsonl", values="full") as watched:
        found = steps()
    assert all(torch.equal(one, other) for one, other in zip(unwatched, found, strict=True))
    assert watched.dropped == 0


@pytest.mark.parametrize(
    "suffix", ["", pytest.param(".gz", marks=pytest.mark.slow), pytest.param(".zst", marks=pytest.mark.slow)]
)
def test_opcapture_stores_the_weights_and_reports_it(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "nets.py").write_text(NETS, encoding="utf-8")
    done = succeed("opcapture", "--model", "nets.py:net", "--values", "full", "-o", f"t.jsonl{suffix}", cwd=tmp_path)
    assert "to t.values.safetensors: they can be private data" in done.stderr
    trace = load(tmp_path / f"t.jsonl{suffix}", partial=False)
    assert trace.header["values_file"] == "t.values.safetensors"
    package = load_safetensors()
    stored = package.torch.load_file(tmp_path / "t.values.safetensors").values()
    torch.manual_seed(0)
    weights = nn.Linear(64, 32), nn.Linear(32, 4)
    assert all(any(torch.equal(item, layer.weight.flatten()) for item in stored) for layer in weights)
    assert not list(tmp_path.glob("*.part*"))
    done = succeed("opreplay", f"t.jsonl{suffix}", "--iterations", "1", "--strict", cwd=tmp_path)
    assert "Warning" not in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-o", "-"], "full values are stored in a file next to the trace"),
        (["-o", "t.jsonl"], "t.values.safetensors exists"),
    ],
)
def test_unwritable_values_file_is_refused_before_the_model_is_built(
    tmp_path: Path, args: list[str], message: str
) -> None:
    (tmp_path / "nets.py").write_text(NETS, encoding="utf-8")
    (tmp_path / "t.values.safetensors").write_text("precious", encoding="utf-8")
    error = refusal("opcapture", "--model", "nets.py:net", "--values", "full", *args, cwd=tmp_path)
    assert message in error.splitlines()[-1]
    assert not (tmp_path / "built").exists()
    assert (tmp_path / "t.values.safetensors").read_text(encoding="utf-8") == "precious"


def test_force_replaces_both_files_and_a_discarded_capture_neither(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    capture(path, lambda: torch.ones(100).sin())
    before = {item.name: item.read_bytes() for item in tmp_path.iterdir()}
    with Capture(path, values="full", force=True) as watched:
        torch.randn(100).sin()
        watched.discard()
    assert {item.name: item.read_bytes() for item in tmp_path.iterdir()} == before
    trace = capture(path, lambda: torch.zeros(100).sin(), force=True)
    assert set(trace.tensors.values()) == TensorFile(*trace.tensor_files).keys()
    assert len(list(tmp_path.iterdir())) == 2


def test_full_values_count_towards_the_byte_limit(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl", values="full", max_bytes=100_000) as watched:
        for size in range(1000, 1100):
            torch.ones(size).sin()
    assert watched.full_values is not None
    assert watched.full_values.bytes_written <= 100_000
    end = load(tmp_path / "t.jsonl", partial=False).end
    assert end is not None
    assert end.stopped == "100000 bytes"


def test_full_disk_loses_only_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = FullValues._write, []

    def fill_up(self: FullValues, *args: Any) -> Any:
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(args)
        return write(self, *args)

    monkeypatch.setattr(FullValues, "_write", fill_up)
    first, second = torch.randn(100), torch.randn(100)
    with pytest.warns(RuntimeWarning, match="could not be written with full values: .*No space left"):
        trace = capture(tmp_path / "t.jsonl", lambda: (first.sin(), second.cos(), second.tan()))
    assert lost(trace) == {"aten.cos.default", "aten.tan.default"}
    assert len(trace.values) == 2
    assert replayed(trace)[0] == [snapshot(first)]
    assert not list(tmp_path.glob("*.part*"))


def run_program(text: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    whole = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | env
    return run_python("-c", text, cwd=folder, env=whole)


def test_trace_of_a_killed_capture_with_full_values_replays(tmp_path: Path) -> None:
    program = """
import os, signal, torch
from opgrip.capture import Capture
with Capture("t.jsonl", values="full", write_ahead=True):
    x = torch.randn(100)
    x.sin(); x.cos()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_program(program, tmp_path).returncode == -signal.SIGKILL
    (cut,) = tmp_path.glob("t.part*.jsonl")
    trace = load(cut)
    assert trace.missing is not None
    assert trace.tensors
    assert trace.tensor_files == ()
    with pytest.warns(RuntimeWarning, match="their file is not next to the trace"):
        assert {"aten.sin.default"} <= {case.op for case in make_cases(trace)}
        assert len(replayed(trace)) == len(trace.tensors)
    assert not (tmp_path / "t.values.safetensors").exists()


def test_merged_trace_finds_the_values_files_of_processes_and_ranks(tmp_path: Path) -> None:
    program = """
import os, torch
from opgrip.capture import Capture
x, y = torch.arange(100.0), torch.arange(1000.0)
with Capture("t.jsonl", values="full"):
    x.sin()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        x.tan()
    else:
        y.cos()
"""
    done = run_program(program, tmp_path, RANK="1", WORLD_SIZE="2")
    assert done.returncode == 0, done.stderr
    traces = sorted(tmp_path.glob("*.jsonl"))
    assert len(traces) == 2
    for path in traces:
        trace = load(path, partial=False)
        assert [file.name for file in trace.tensor_files] == [f"{path.stem}.values.safetensors"]
        assert TensorFile(*trace.tensor_files).keys() == set(trace.tensors.values())
    merge(traces, tmp_path / "whole.jsonl")
    trace = load(tmp_path / "whole.jsonl", partial=False)
    assert len(trace.tensor_files) == 2
    seen = {"sin": torch.arange(100.0), "tan": torch.arange(100.0), "cos": torch.arange(1000.0)}
    names = {signature.number: signature.op.split(".")[1] for signature in trace.signatures}
    assert {names[number]: found for number, found in replayed(trace).items()} == {
        name: [snapshot(tensor)] for name, tensor in seen.items()
    }


def test_case_with_full_values_can_be_pickled(tmp_path: Path) -> None:
    x = torch.randn(100)
    (case,) = make_cases(capture(tmp_path / "t.jsonl", x.sin))
    (values,) = pickle.loads(pickle.dumps(case)).values.values()
    assert torch.equal(values.draw((100,), torch.float32, torch.Generator()), x)


KNOWN = sorted(
    name
    for name, dtype in DTYPES.items()
    if (dtype.is_floating_point or dtype.is_complex or "int" in name or name == "bool")
    and not name.startswith(("q", "float4"))
    and not any(name == f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
)


def headed(path: Path, fields: dict[str, Any]) -> Path:
    with TraceWriter(path, Header(fields)):
        pass
    return path


@pytest.mark.parametrize(
    ("trace", "values"),
    [
        ("step.jsonl", "step.values.safetensors"),
        ("step.jsonl.gz", "step.values.safetensors"),
        ("step.jsonl.zst", "step.values.safetensors"),
        ("step.rank1.jsonl", "step.rank1.values.safetensors"),
    ],
)
def test_values_file_is_named_after_its_trace(tmp_path: Path, trace: str, values: str) -> None:
    assert values_path(tmp_path / trace) == tmp_path / values


@given(st.sampled_from(KNOWN), st.binary(min_size=16, max_size=160))
def test_values_of_every_dtype_are_restored_bit_for_bit(name: str, content: bytes) -> None:
    dtype = DTYPES[name]
    content = bytes(byte % 2 for byte in content) if dtype == torch.bool else content
    flat = torch.frombuffer(bytearray(content[: len(content) // 16 * 16]), dtype=torch.uint8).view(dtype)
    found = from_stored(to_stored(flat), dtype)
    assert found is not None
    assert found.dtype == dtype
    assert found.view(torch.uint8).tolist() == flat.view(torch.uint8).tolist()


def test_nonzero_bytes_of_an_untrusted_file_become_true() -> None:
    found = from_stored(torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool), torch.bool)
    assert found is not None
    assert found.view(torch.uint8).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(torch.float32, torch.float64), (torch.int32, torch.complex64), (torch.uint8, torch.complex64)],
)
def test_values_of_another_dtype_are_not_used(stored: torch.dtype, dtype: torch.dtype) -> None:
    assert from_stored(torch.ones(3, dtype=stored), dtype) is None


@pytest.mark.parametrize("name", ["../t.safetensors", "/etc/passwd", "a/b", "a/", "..", ".", "", 7.5, ["x"]])
def test_header_may_only_name_a_values_file_in_the_same_folder(tmp_path: Path, name: Any) -> None:
    path = headed(tmp_path / "t.jsonl", {"values_file": name})
    if isinstance(name, str):
        with pytest.raises(UserError, match="the values must be in a file in the same folder"):
            load(path)
    else:
        assert load(path).tensor_files == ()


@pytest.mark.parametrize("name", ["no\0name", "\ud800", "x" * 5000, "folder"])
def test_impossible_values_file_name_is_ignored(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    assert load(headed(tmp_path / "t.jsonl", {"values_file": name})).tensor_files == ()


def test_values_file_is_found_through_links(tmp_path: Path) -> None:
    for folder in ("runs", "links", "store"):
        (tmp_path / folder).mkdir()
    trace = headed(tmp_path / "runs" / "t.jsonl", {"values_file": "t.values.safetensors"})
    values = tmp_path / "runs" / "t.values.safetensors"
    values.touch()
    (tmp_path / "latest.jsonl").symlink_to(trace)
    assert load(tmp_path / "latest.jsonl").tensor_files == (values,)
    stored = [path.rename(tmp_path / "store" / str(number)) for number, path in enumerate((trace, values))]
    for name, path in zip(("t.jsonl", "t.values.safetensors"), stored, strict=True):
        (tmp_path / "links" / name).symlink_to(path)
    assert load(tmp_path / "links" / "t.jsonl").tensor_files == (tmp_path / "links" / "t.values.safetensors",)


@pytest.mark.parametrize("key", ["", "../x", "0" * 31, "G" * 32, "0" * 129, 7, ["0" * 32]])
def test_key_that_is_not_a_hash_is_damage(tmp_path: Path, key: Any) -> None:
    path = write(tmp_path / "t.jsonl")
    form = {"type": "values", "id": 9, "model": "booleans", "true": 1, "total": 2, "tensor": key}
    path.write_text(path.read_text(encoding="utf-8") + json.dumps(form) + "\n", encoding="utf-8")
    reader = TraceReader(path)
    list(reader)
    assert reader.missing is not None
    assert "damaged" in reader.missing


def test_tensor_key_survives_writing_and_reading(tmp_path: Path) -> None:
    record = Values(9, Booleans(1, 2), "0123456789abcdef" * 2)
    path = write(tmp_path / "t.jsonl", [*RECORDS, record])
    assert record in read(path)
    assert load(path).tensors == {9: record.tensor}


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\xff" * 100, b"\x02" + b"\0" * 7 + b"{]"])
def test_foreign_values_file_is_reported_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(UserError, match="is not a file of safetensors"):
        TensorFile(tmp_path / "t").keys()


def test_values_at_any_offset_are_read(tmp_path: Path) -> None:
    forms = {"a": ("U8", 3, 0, 3), "b": ("F64", 2, 3, 19), "c": ("U8", 16, 19, 35)}
    header = {
        key: {"dtype": dtype, "shape": [count], "data_offsets": [start, end]}
        for key, (dtype, count, start, end) in forms.items()
    }
    text = json.dumps(header).encode()
    numbers = torch.tensor([1.5, 2.5, 3.5, 4.5], dtype=torch.float64)
    content = b"abc" + bytes(numbers.view(torch.uint8).tolist())
    (tmp_path / "t").write_bytes(len(text).to_bytes(8, "little") + text + content)
    file = TensorFile(tmp_path / "t")
    found = [file.read("b"), from_stored(file.read("c"), torch.float64), from_stored(file.read("c"), torch.complex128)]
    assert found[0].tolist() == [1.5, 2.5]
    assert found[1] is None
    assert found[2] is not None
    assert found[2].tolist() == [3.5 + 4.5j]
    assert all(item.data_ptr() % 16 == 0 for item in found if item is not None)


VALUES = torch.linspace(0, 10, 100).sin()  # values that no value model represents exactly


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Capture(tmp_path / "t.jsonl", values="full"):
        VALUES.sin()
    return tmp_path


def drawn(folder: Path, shape: tuple[int, ...] = (100,), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    (case,) = make_cases(load(folder / "t.jsonl"))
    (values,) = case.values.values()
    return values.draw(shape, dtype, torch.Generator().manual_seed(0))


def test_complete_file_returns_the_values_of_the_program(folder: Path) -> None:
    assert torch.equal(drawn(folder), VALUES)
    assert torch.equal(drawn(folder, (5, 20)), VALUES.reshape(5, 20))


@pytest.mark.parametrize(("shape", "dtype"), [((99,), torch.float32), ((100,), torch.float64), ((100,), torch.int32)])
def test_other_shapes_and_dtypes_are_drawn_from_the_model(
    folder: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    found = drawn(folder, shape, dtype)
    assert (found.shape, found.dtype) == (shape, dtype)
    assert not torch.equal(found.double(), VALUES[: len(found)].double())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replace(path: Path) -> None:
    load_safetensors().torch.save_file({"0" * 32: torch.ones(100)}, path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (Path.unlink, "their file is not next to the trace"),
        (lambda path: path.write_bytes(b""), "is not a file of safetensors"),
        (cut, "is not a file of safetensors"),
        (replace, "the file next to the trace does not contain them"),
    ],
)
def test_corrupt_values_file_is_reported_and_models_are_used(
    folder: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(folder / "t.values.safetensors")
    with pytest.warns(RuntimeWarning, match=f"1 of 1 recorded tensors are replaced by generated values: .*{message}"):
        found = drawn(folder)
    assert found.shape == (100,)
    assert not torch.equal(found, VALUES)
