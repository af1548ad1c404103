"""Tests that cases run under the settings of their capture."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from settings import rows_of, settings_of
from torch.nn import functional

from opgrip.capture import Capture
from opgrip.platform.precisions import (
    CUDA_FLAGS,
    HOST_FLAGS,
    describe_precisions,
    flag_reader,
    flag_text,
    read_precision,
    set_precision,
    write_flag,
)
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.cases.unused_results import FOR_BACKWARD, with_unused_results
from opgrip.replay.command.run_requests import request_with
from opgrip.replay.modes import RunOutputs
from opgrip.replay.operators.contexts import restored
from opgrip.replay.run.checks.reference import Reference
from opgrip.replay.run.checks.verdicts import Tolerance
from opgrip.replay.run.workload import load_workload
from opgrip.replay.timing.timed_functions import TimedFunction
from opgrip.traces import Trace, load


def settings_now() -> dict[str, Any]:
    return {
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,
        "mkldnn": torch.backends.mkldnn.enabled,
        "flush_denormal": float(torch.full((1,), 1e-40, dtype=torch.float32).mul(1)) == 0,
    }


def test_settings_apply_in_the_block_and_are_restored() -> None:
    before = settings_now()
    wanted = {
        "inference": True,
        "deterministic": True,
        "deterministic_warn_only": True,
        "matmul_precision": "high",
        "threads": 1,
        "default_dtype": "float64",
        "fill_uninitialized_memory": False,
        "mkldnn": False,
        "flush_denormal": True,
    }
    assert wanted != before
    with restored(wanted) as refused:
        assert settings_now() == wanted
    assert not refused
    assert settings_now() == before


def test_each_flag_is_recorded_as_it_is_restored(tmp_path: Path) -> None:
    before = {name: flag_text(flag_reader(suffix)()) for name, suffix in HOST_FLAGS.items()}
    # the engine is a number, and which ones work depends on the processor
    changed = {name: not value for name, value in before.items() if isinstance(value, bool)}
    with Capture(tmp_path / "t.jsonl"):
        torch.ones(3).sin()
        with restored({**changed, "flush_denormal": True}) as refused:
            torch.ones(3).cos()
        torch.ones(3).tan()
    trace = load(tmp_path / "t.jsonl")
    contexts = {case.op.split(".")[1]: case.context for case in make_cases(trace)}
    changed = {name: value for name, value in changed.items() if name not in refused}
    assert {"mkldnn", "nnpack"} <= {*changed}
    for op, flags in (("sin", before), ("cos", before | changed), ("tan", before)):
        assert {name: contexts[op][name] for name in flags} == flags
    assert [contexts[op]["flush_denormal"] for op in ("sin", "cos", "tan")] == [False, True, False]
    for suffix in (*HOST_FLAGS.values(), *CUDA_FLAGS.values()):
        value = flag_reader(suffix)()
        if value is not None:
            write_flag(suffix, flag_text(value))
        assert flag_reader(suffix)() == value


def test_row_names_a_setting_that_cannot_be_restored(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"):
        torch.ones(3).sin()
    path = tmp_path / "other.jsonl"
    path.write_text((tmp_path / "t.jsonl").read_text().replace('"quantized_engine":', '"quantized_engine":77'))
    row, *_ = rows_of(make_cases(load(path)), settings_of(warmup=1, iterations=1))
    assert (row.status, row.note) == ("ok", "the captured setting quantized_engine cannot be restored")


def test_other_environment_of_kernels_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    with Capture(tmp_path / "t.jsonl"):
        torch.ones(3).sin()
    assert not load_workload(request_with(tmp_path / "t.jsonl")).notes
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    (note,) = load_workload(request_with(tmp_path / "t.jsonl")).notes
    assert "ONEDNN_MAX_CPU_ISA was SSE41 in the program and is unset here" in note


# settings of torch._C, torch, and torch.backends (with the place below it) that contexts do not have, by reason
OTHERS = {
    "has no effect on the time of a call": """
        autograd_fallback_mode backcompat_broadcast_warn backcompat_keepdim_warn default_mobile_cpu_allocator
        dtensor_allow_implicit_replication fwd_grad_enabled grad_layout_enforcement_enabled graph_exec_group
        graph_executor_optimize multithreading_enabled only_lift_cpu_tensors override_stale_capture_stream
        print_stack_traces_on_fatal_signal should_use_format_with_string_table thread_name throw_on_mutable_data_ptr
        view_replay_enabled warnAlways warn_deprecated_on_mutable_data_ptr warn_on_accumulate_grad_stream_mismatch
        anomaly_enabled printoptions rng_state warn_always num_interop_threads deterministic_debug_mode
        storage_access_error_msg storage_data_ptr_access_error_msg mkl.verbose mkldnn.verbose""",
    "decides which operators are called": """
        autocast_cache_enabled autocast_cpu_dtype autocast_cpu_enabled autocast_dtype autocast_enabled
        autocast_gpu_dtype autocast_ipu_dtype autocast_ipu_enabled autocast_xla_dtype autocast_xla_enabled
        cached_tensors_enabled default_device default_tensor_type math_sdp_allow_fp16_bf16_reduction sdp_priority_order
        sdp_use_cudnn sdp_use_fa3 sdp_use_fa4 sdp_use_flash sdp_use_math sdp_use_mem_efficient sdp_use_overrideable
        cuda.allow_fp16_bf16_reduction_math_sdp cuda.enable_cudnn_sdp cuda.enable_flash_sdp cuda.enable_math_sdp
        cuda.enable_mem_efficient_sdp mha._is_fastpath_enabled mha.set_fastpath_enabled
        opt_einsum.enabled opt_einsum.strategy""",
    "is no setting": """
        conj neg dispatch_mode generator_metaclass meta_in_tls_dispatch_include skip_next_torch_function
        tensor_metadata torch_function_state tracing_state value_trace worker_pids worker_signal_handlers fake_constant
        vital native_aot_unconditional_masked cudnn.__cudnn_version cusparselt.__MAX_ALG_ID
        cusparselt.__cusparselt_version mps._lib xeon.run_cpu.set_env xeon.run_cpu.set_memory_allocator
        xeon.run_cpu.set_multi_thread_and_allocator __allow_nonbracketed_mutation_flag disable_global_flags""",
    "is recorded by another name, or in the header": """
        default_dtype grad_enabled float32_matmul_precision fp32_precision_setter cublas_allow_tf32 onednn_allow_tf32
        deterministic_algorithms num_threads flush_denormal
        fp32_precision cuda.fp32_precision cudnn.fp32_precision cudnn.rnn.fp32_precision mkldnn.fp32_precision
        cuda.allow_tf32 cudnn.allow_tf32 mkldnn.allow_tf32 cuda.allow_fp16_accumulation
        cuda.allow_bf16_reduced_precision_reduction cuda.allow_fp16_reduced_precision_reduction
        cuda.preferred_blas_library cuda.preferred_linalg_library cuda.preferred_rocm_fa_library
        cuda.prefer_cublaslt_grouped_gemm cuda.max_size cudnn.enabled cudnn.benchmark cudnn.benchmark_limit
        cudnn.deterministic cudnn.depthwise_kernel miopen.immediate mkldnn.enabled mkldnn.deterministic
        python_native.enabled""",
    "sets several others": """
        set_flags cudnn.set_flags miopen.set_flags mkldnn.set_flags nnpack.set_flags opt_einsum.set_flags
        python_native.enable python_native.disable python_native.disabled""",
    "cannot be read, or only checks sparse tensors and shares a GPU": """
        check_sparse_tensor_invariants sm_carveout_experimental
        python_native.disable_dispatch_keys python_native.disable_operations
        python_native.enable_dispatch_keys python_native.enable_operations cuda.size""",
}


def settings_of_backends() -> Iterator[str]:
    """Yield the attributes and functions in the code of `torch.backends` that set something, also of absent devices."""
    for package in torch.backends.__path__:
        for path in Path(package).rglob("*.py"):
            module = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix("__init__")
            for node in ast.walk(ast.parse(path.read_text())):
                for name in names_set_by(node):
                    yield f"{module.rstrip('.')}.{name}".lstrip(".")


def names_set_by(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id=kind))):
            yield from [name] if kind.endswith("ContextProp") else ()
        case ast.FunctionDef(name="__setattr__"):
            compared = (part.comparators[0] for part in ast.walk(node) if isinstance(part, ast.Compare))
            yield from (value.value for value in compared if isinstance(value, ast.Constant))
        case ast.FunctionDef(name=name, decorator_list=decorators):
            is_setter = any(isinstance(item, ast.Attribute) and item.attr == "setter" for item in decorators)
            yield from [name] if is_setter or re.match("set_|enable|disable|allow_|preferred_", name) else ()
        case ast.ClassDef(name="verbose"):
            yield node.name
        case ast.Global():
            yield from node.names


def test_each_setting_of_torch_is_recorded_or_left_out_for_a_reason() -> None:
    setters = [name.removeprefix("_set_") for name in dir(torch._C) if name.startswith("_set_")]
    setters += [name.removeprefix("set_") for name in dir(torch) if name.startswith("set_")]
    backends = [*settings_of_backends()]
    assert {"cudnn.benchmark_limit", "opt_einsum.strategy", "cuda.enable_flash_sdp"} <= {*backends}
    known = {*HOST_FLAGS.values(), *CUDA_FLAGS.values(), *" ".join(OTHERS.values()).split()}
    assert not {*setters, *backends} - known


def test_invalid_settings_of_an_untrusted_trace_are_ignored() -> None:
    before = settings_now()
    with restored({"threads": -3, "matmul_precision": "rm -rf", "default_dtype": "int64", "inference": "yes", "x": 1}):
        assert settings_now() == before


def test_case_runs_under_its_captured_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.ones(3), torch.ones(4)
    with Capture(tmp_path / "t.jsonl"):
        x.sin()
        with torch.inference_mode():
            y.sin()
    cases = make_cases(load(tmp_path / "t.jsonl"))
    assert {case.signature.args[0].shape: case.context["inference"] for case in cases} == {(3,): False, (4,): True}
    seen = []
    original = TimedFunction.run

    def watching(timed_function: TimedFunction) -> None:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        original(timed_function)

    monkeypatch.setattr(TimedFunction, "run", watching)
    results = list(rows_of(cases, settings_of(warmup=1, iterations=1)))
    assert [result.status for result in results] == ["ok", "ok"]
    assert seen == [(case.context["inference"], False) for case in cases]


PRECISION = pytest.mark.skipif(read_precision("cuda.matmul") is None, reason="torch has one precision for all places")


@pytest.fixture
def tf32() -> Iterator[None]:
    """Allow TF32 products with torch's newer setting (2.9 and later), after which the older setting cannot be read."""
    before = read_precision("cuda.matmul")
    set_precision("cuda.matmul", "tf32")
    yield
    set_precision("cuda.matmul", before)


@PRECISION
@pytest.mark.usefixtures("tf32")
def test_per_backend_precisions_are_captured(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    with Capture(tmp_path / "t.jsonl") as watched:
        torch.ones(3).sin()
    trace = load(tmp_path / "t.jsonl")
    assert (watched.calls, watched.dropped) == (2, 0)
    assert {context["fp32_precision"] for context in trace.contexts.values()} == {"cuda.matmul:tf32"}


@PRECISION
def test_per_backend_precisions_apply_in_the_block_and_are_restored() -> None:
    before = describe_precisions()
    with restored({"fp32_precision": "cuda.matmul:tf32,mkldnn.conv:bf16,os.system:tf32,cudnn.rnn:rm -rf"}):
        assert describe_precisions() == "cuda.matmul:tf32,mkldnn.conv:bf16"
    assert describe_precisions() == before


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return traces of a step with attention and a norm, for prediction and for training."""
    folder = tmp_path_factory.mktemp("unused")
    torch.manual_seed(0)
    query, weight = torch.randn(2, 4, 8, 16), torch.ones(16, requires_grad=True)
    paths = {kind: folder / f"{kind}.jsonl" for kind in ("predict", "train")}
    for kind, path in paths.items():
        with torch.set_grad_enabled(kind == "train"), Capture(path):
            scaled = functional.layer_norm(query * weight, (16,), weight)
            result = functional.scaled_dot_product_attention(scaled, scaled, scaled)
            if kind == "train":
                result.sum().backward()
    return paths


def unused_in(trace: Trace) -> dict[str, set[int]]:
    cases = with_unused_results(make_cases(trace), trace)
    return {case.op: {*case.unused} for case in cases if case.op.split(".")[1] in FOR_BACKWARD}


PREDICTING = {ATTENTION: {1}, "aten.native_layer_norm.default": {1, 2}}
TRAINING = {ATTENTION: set[int](), "aten.native_layer_norm.default": set[int]()}


def test_dataflow_shows_which_results_a_program_uses(traces: dict[str, Path]) -> None:
    assert unused_in(load(traces["predict"])) == PREDICTING
    assert unused_in(load(traces["train"])) == TRAINING


def test_unused_results_are_determined_only_for_compared_modes(traces: dict[str, Path]) -> None:
    places = {
        mode: {case.op: {*case.unused} for case in load_workload(request_with(traces["predict"], mode=[mode])).cases}
        for mode in ("eager", "jit")
    }
    assert places["jit"][ATTENTION] == {1}
    assert places["eager"][ATTENTION] == set()


def test_difference_in_an_unused_result_is_noted() -> None:
    def two() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(3), torch.ones(2)

    reference = Reference(two, lambda: ((), {}), False, None, unused={1})
    others = ((torch.ones(4), " is (4,), not (2,)"), (torch.zeros(2), ": 2 of 2 elements differ, by 1 (rel 1)"))
    for other, note in others:
        verdict = reference.check(RunOutputs([torch.ones(3), other]), Tolerance())
        assert (verdict.right, verdict.max_abs) == (True, 0)
        assert verdict.notes[0].startswith(f"unused output 1{note}")
    assert not reference.check(RunOutputs([torch.zeros(3), torch.ones(2)]), Tolerance()).right
