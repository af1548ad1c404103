"""The machine's memory, precisions and accelerators, private names of torch, and short messages for errors."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from nvml import UUID, Nvml, properties_of

from opgrip.capture.torch_compat import compiler_private, torch_private
from opgrip.errors import UserError, cause_of, one_line, shortened
from opgrip.platform import activity_records, machine
from opgrip.platform import private_apis as private_places
from opgrip.platform.machine import check_device
from opgrip.platform.precisions import allows_tf32, read_precision, set_precision
from opgrip.platform.private_apis import FOUND, PrivatePlaces
from opgrip.replay.operators import torch_private as replay_private
from opgrip.replay.operators.lookup import Unsupported
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.table.accelerators import describe_accelerators, device_of, facts_in_words, merge_facts

MB = 1 << 20


def container(folder: Path, most: str, used: int, idle_files: int) -> None:
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - idle_files}\ninactive_file {idle_files}\nactive_file 7\n")


def test_file_cache_of_a_container_counts_as_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    container(tmp_path, str(100 * MB), used=90 * MB, idle_files=60 * MB)
    assert machine.free_memory("cpu") == 70 * MB


@pytest.mark.skipif(read_precision("cuda.matmul") is None, reason="torch has one precision for all places")
def test_old_and_new_settings_determine_tf32() -> None:
    assert not allows_tf32("cuda.matmul")
    before = read_precision("cuda.matmul")
    try:
        torch.set_float32_matmul_precision("high")
        assert allows_tf32("cuda.matmul")
        torch.set_float32_matmul_precision("highest")
        assert not allows_tf32("cuda.matmul")
        set_precision("cuda.matmul", "tf32")
        assert allows_tf32("cuda.matmul")
    finally:
        set_precision("cuda.matmul", before)


def test_existing_private_names_are_used_and_missing_ones_replaced() -> None:
    import torch

    places = PrivatePlaces()
    assert places.take("torch.UntypedStorage", None, "nothing") is torch.UntypedStorage
    assert places.take("torch._C._no_such_thing.at_all", 7, "seven") == 7
    assert places.take_later("torch._C._no_such_thing", 8, "eight")() == 8
    assert places.take_later("torch._no_such_module.thing", 9, "nine")() == 9
    assert places.report() == {
        "torch.UntypedStorage": FOUND,
        "torch._C._no_such_thing.at_all": "seven",
        "torch._C._no_such_thing": "eight",
        "torch._no_such_module.thing": "nine",
    }


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 4503599627370496 bytes. Error code 12 (Cannot allocate memory)",
            "out of memory: 5 PB were requested",
        ),
        (
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 3.01 "
            "GiB is free. Including non-PyTorch memory, this process has 1 GiB memory in use.",
            "out of memory: 20.00 GiB were requested, and 3.01 GiB of 139.72 GiB on the GPU are free",
        ),
        (
            "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver ...",
            "the NVIDIA driver is too old for this torch: it supports CUDA 12.2",
        ),
        (
            "Could not run 'aten::nms' with arguments from the 'MPS' backend. This could be because ...",
            "aten::nms has no kernel for MPS",
        ),
        (
            f"not {torch.ones(2, 2, dtype=torch.half)}, {torch.tensor(3.0)!r} or {np.ones(3)!r}: give the tensor(s)",
            "RuntimeError: not tensor(...), tensor(...) or array(...): give the tensor(s)",
        ),
        ("mat1 and mat2\nshapes " + "x" * 500, "RuntimeError: mat1 and mat2 shapes " + "x" * 500),
    ],
)
def test_common_errors_are_shortened_and_others_kept(message: str, cause: str) -> None:
    assert cause_of(RuntimeError(message)) == cause


def test_shortened_text_ends_with_a_whole_word() -> None:
    assert shortened("three words here", 13) == "three ..."
    assert shortened("three words here", 16) == "three words here"
    assert one_line(ValueError("many words " * 30), 40).endswith("words ...")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("foo", "'foo' is not a device known to torch: name one such as cpu, cuda or cuda:1"),
        ("cuda:256", "'cuda:256' is not a device known to torch: "),
        ("mtia", "no MTIA device here: "),
    ],
)
def test_missing_device_is_one_clear_line(name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_device(name)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 200


H200 = SimpleNamespace(
    uuid=UUID, name="NVIDIA H200", total_memory=150 << 30, L2_cache_size=50 << 20, multi_processor_count=132
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    return nvml


def test_gpu_is_described_by_torch_and_nvml(gpu: Nvml) -> None:
    facts = describe_accelerators(["cuda:0"])
    assert facts["devices"]["cuda:0"] == {
        "name": "NVIDIA H200",
        "capability": "9.0",
        "multiprocessors": 132,
        "memory_bytes": 150 << 30,
        "l2_bytes": 50 << 20,
        "power_limit_w": 700.0,
        "max_sm_mhz": 1980.0,
        "max_memory_mhz": 3201.0,
        "ecc": True,
        "mig": False,
    }
    versions = {"driver": "550.54.15", "driver_cuda": "12.4", "cuda": "12.8", "cudnn": "9.10.2", "nccl": "2.27.3"}
    assert facts["libraries"] == versions
    assert facts["settings"]["allocator"] == "native"
    assert gpu.closed


def test_settings_are_read_at_the_time_of_the_call(gpu: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "allow_bf16_reduced_precision_reduction"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    before = describe_accelerators(["cuda:0"])["settings"]
    assert before["environment"] == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert set(before["attention"]) >= {"flash", "math"}
    assert before[name] is True
    assert before["fp32_precision"]["cudnn.conv"] == "tf32"
    torch.backends.cuda.enable_flash_sdp(False)
    setattr(torch.backends.cuda.matmul, name, False)
    native = getattr(torch.backends, "python_native", None)
    try:
        with nullcontext() if native is None else native.triton.disabled():
            after = describe_accelerators(["cuda:0"])["settings"]
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
        setattr(torch.backends.cuda.matmul, name, True)
    assert "flash" not in after["attention"]
    assert after[name] is False
    assert [facts.get("triton_kernels") for facts in (before, after)] == (
        [None] * 2 if native is None else [True, False]
    )


def test_unavailable_facts_are_left_out(gpu: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", refuse)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties_of)
    facts = describe_accelerators(["cuda:0"])
    assert facts["devices"] == {"cuda:0": {}}
    assert "driver_cuda" not in facts["libraries"]


@pytest.mark.parametrize(
    "strange",
    [None, [], "x", {"devices": 3}, {"devices": {"cuda:0": []}}, {"libraries": [1], "settings": {"a_bytes": {}}}],
)
def test_untrusted_facts_are_printed_as_lines(strange: object) -> None:
    assert all(isinstance(text, str) for _, text in facts_in_words(strange))


def test_facts_of_two_ranks_are_merged() -> None:
    first = {"devices": {"cuda:0": {"name": "A"}}, "libraries": {"cuda": "12.4"}}
    second = {"devices": {"cuda:1": {"name": "B"}}, "libraries": {"cuda": "12.8"}}
    joined = merge_facts(first, second)
    assert joined == {"devices": {"cuda:0": {"name": "A"}, "cuda:1": {"name": "B"}}, "libraries": {"cuda": "12.8"}}


def test_call_is_on_the_first_accelerator_among_its_tensors() -> None:
    def spec(device: str) -> TensorSpec:
        return TensorSpec((2,), (1,), torch.float32, device)

    def call(args: tuple[object, ...], outputs: object = None) -> Signature:
        return Signature(0, OPERATOR, "aten.x", args, {}, outputs)

    assert device_of(call((spec("cpu"), [spec("cuda:1"), spec("cuda:0")]))) == "cuda:1"
    assert device_of(call((3,), spec("xpu:0"))) == "xpu:0"
    assert device_of(call((spec("meta"),), spec("meta"))) == "meta"
    assert device_of(call((3,))) == "cpu"


MODULES = pytest.mark.parametrize(
    "module",
    [torch_private, compiler_private, activity_records, replay_private],
    ids=lambda module: module.__name__,
)


def load_without_places(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(private_places, "_at", lambda name: None)
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_bare", str(module.__file__))
    assert spec is not None
    assert spec.loader is not None
    bare = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    monkeypatch.setitem(sys.modules, spec.name, bare)
    spec.loader.exec_module(bare)
    return bare


def private_names(module: ModuleType) -> Iterator[str]:
    """Yield the private names of torch that a module's code reads itself, such as `torch._C._dispatch_keys`."""
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.startswith("torch.") and any(part.startswith("_") for part in name.split(".")) and "__" not in name:
                yield name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            for alias in node.names:
                if "._" in f"{node.module}.{alias.name}":
                    yield f"{node.module}.{alias.name}"


def is_declared(name: str, places: dict[str, str]) -> bool:
    """Return True if a dotted name is a key of `places`, the declared private APIs, a parent or an attribute of one."""
    return any(place == name or place.startswith(f"{name}.") or name.startswith(f"{place}.") for place in places)


@MODULES
def test_every_private_name_is_declared_with_its_fallback(module: ModuleType) -> None:
    places = module.private_places()
    assert all(state.strip() for state in places.values())
    public = {"torch.utils._python_dispatch.TorchDispatchMode"}
    assert [name for name in private_names(module) if name not in public and not is_declared(name, places)] == []


@MODULES
def test_torch_without_private_names_reports_the_fallbacks(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = load_without_places(module, monkeypatch)
    places = bare.private_places()
    assert set(places) == set(module.private_places())
    # this API is not found by its name
    assert {name for name, state in places.items() if state == FOUND} <= {"torch.classes.c10d.ReduceOp.op"}


def test_calls_are_distinguished_by_keys_without_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = load_without_places(torch_private, monkeypatch)
    x = torch.rand(3)
    bare.load_private()
    assert bare.arguments_check((x,)) is None
    assert bare.keywords_check({"dim": 0}) is None
    assert bare.storage_address(x) == bare.storage_address(x[1:]) != bare.storage_address(x + 1)
    assert bare.current_autograd_node() is None
    assert bare.sequence_number() == 0
    assert not load_without_places(compiler_private, monkeypatch).hide_from_compiler(lambda: None)
    assert not bare.is_transformed(x)
    assert not bare.is_transforming()
    with bare.without_modes(), bare.without_functions():
        assert torch.equal(x + 1, 1 + x)


def test_higher_order_operators_are_plain_calls_without_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = load_without_places(compiler_private, monkeypatch)
    assert not bare.is_higher_order(torch.ops.higher_order.cond)
    assert bare.own_code(torch.ops.higher_order.cond, (), {}) is None
    assert bare.place_of_compiling() is None


def test_modes_that_need_a_missing_private_name_are_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = load_without_places(replay_private, monkeypatch)
    bare.compile_in_this_process()
    assert "inductor" in bare.dynamo_backends()
    with pytest.raises(Unsupported, match="what dynamo compiled"):
        bare.graphs_compiled()
    with pytest.raises(Unsupported, match="AOTInductor"):
        bare.packaged(None, "nowhere", make=True)
    assert bare.traced_backward(lambda x: [x], [torch.ones(1)], lambda results: None) is None
