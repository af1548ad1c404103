"""Operators registered in torch that a trace may name."""

import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from programs import SHIPPED_TRACES, run_python

from opgrip.replay.command.job import job_from_arguments, make_parser
from opgrip.replay.command.run_requests import options_of
from opgrip.replay.inputs.input_options import InputOptions
from opgrip.replay.operators.admission import LOOK_FOR, MMCV, Untrusted
from opgrip.replay.operators.lookup import (
    BETWEEN_PROCESSES,
    COMPUTING,
    OF_TORCH_ITSELF,
    Unsupported,
    find_operator,
    is_private,
    refusal,
)
from opgrip.traces import load
from opgrip.traces.schema.records import EXTENSION, OPERATOR, Signature

# Words in names of operators that need a manual review.
DOUBTFUL = re.compile(
    r"unsafe|unchecked|reinterpret|alias|strided|storage|view_from|resize|^set_|file|load|save|print|blob|ptr|pointer|memcpy"
    r"|pool_from|fork|exec|shared"
)
# Reviewed operators that a trace may name; `_copy` after a name is the same on a copy.
LOOKED_AT = re.compile(
    # compute on copies, or check bounds of the storage
    r"_unsafe_(view|index|index_put_?|masked_index|masked_index_put_accumulate)|unsafe_(chunk|split|split_with_sizes)"
    r"|alias|as_strided_?|as_strided_scatter|(new_)?empty_strided|copy_strided|sym_storage_offset|storage_offset"
    r"|_copy_from_and_resize|_has_same_storage_numel|_nested_tensor_storage_offsets|lift_fresh|clone_from_strided"
    # allocate the memory that they need for their tensor
    r"|(_sparse_)?resize(_as)?(_sparse)?_?|_resize_output_?|sparse_resize(_and_clear)?_?|set_data|set_|set"
    # writes a constant line to standard output
    r"|_print"
)

LIST = """
import importlib, sys, torch
for name in ("torch._inductor.inductor_prims", "torch.distributed._functional_collectives", "torch._prims"):
    importlib.import_module(name)
for schema in torch._C._jit_get_all_schemas():
    print(schema.name, schema.overload_name or "default")
"""


@pytest.fixture(scope="module")
def operators() -> list[Any]:
    lines = run_python("-c", LIST).stdout.splitlines()
    overloads = []
    for namespace, packet, overload in (re.split("::| ", line) for line in lines):
        function = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
        if isinstance(function, torch._ops.OpOverload):
            overloads.append(function)
    assert len(overloads) > 3000
    return overloads


@pytest.mark.slow
def test_every_torch_namespace_is_classified(operators: list[Any]) -> None:
    judged = COMPUTING | BETWEEN_PROCESSES | OF_TORCH_ITSELF
    assert {function.namespace for function in operators} <= judged


def test_operators_with_doubtful_names_were_reviewed(operators: list[Any]) -> None:
    doubtful = set()
    for function in operators:
        name = function._schema.name.partition("::")[2]
        was_looked_at = LOOKED_AT.fullmatch(re.sub("_(copy|out)$", "", name))
        if DOUBTFUL.search(name) and not was_looked_at and refusal(function) is None:
            doubtful.add(function._schema.name)
    assert doubtful == set()


def test_allowed_operators_take_no_files_addresses_or_objects(operators: list[Any]) -> None:
    for function in operators:
        if refusal(function) is None:
            for argument in function._schema.arguments:
                assert argument.name not in ("filename", "file_name", "ptr", "data_ptr"), function
                assert argument.name != "path" or "int" in str(argument.type), function
                assert str(argument.type) not in ("PyObject", "AnyClassType", "RRef[t]", "Future[t]"), function


@pytest.mark.parametrize(
    "op",
    [
        *("aten.add.Tensor", "aten.as_strided.default", "aten._unsafe_view.default", "aten.set_.source_Tensor"),
        *("aten.native_batch_norm.default", "aten._fused_adam_.default", "aten.resize_.default", "aten.einsum.default"),
        *("aten._sparse_coo_tensor_with_dims_and_tensors.default", "aten.max_pool2d_with_indices_backward.default"),
        *("quantized.add.default", "aten.empty_strided.default", "prims.convert_element_type.default"),
        # documented in some versions of torch only
        *("aten.index.Tensor", "aten.segment_reduce.default"),
    ],
)
def test_common_operators_are_allowed(op: str) -> None:
    assert find_operator(Signature(0, OPERATOR, op, (), {})).function is not None


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("aten.no_such_op.default", "is not registered"),
        ("nowhere.op.default", "is not registered"),
        ("aten.add.NoOverload", "is not registered"),
        ("aten.__class__.default", "is not registered"),
        ("aten.add.__init__", "is not registered"),
        ("import_module.os.system", "is not registered"),
        ("os.system", "is not an operator's name"),
        ("aten.add.Tensor; rm -rf", "is not an operator's name"),
        ("inductor._reinterpret_tensor.default", "is for torch's own compilers"),
        ("inductor.resize_storage_bytes_.default", "is for torch's own compilers"),
        ("debugprims.load_tensor.default", "is for torch's own compilers|is not registered"),
        ("prim.Print.default", "is for torch's own compilers"),
        ("aten.warn.default", "is only for TorchScript"),
        ("aten._reshape_alias.default", "is private and was not reviewed"),
        ("aten._sparse_csr_tensor_unsafe.default", "is private and was not reviewed"),
        ("aten._sobol_engine_ff_.default", "is private and was not reviewed"),
        ("aten.sparse_compressed_tensor.comp_plain_value", "does not check which memory it accesses"),
        ("aten.sparse_csr_tensor.crow_col_value_size", "does not check which memory it accesses"),
        ("aten._cummax_helper.default", "is private and was not reviewed"),
        ("aten.slow_conv_transpose2d.default", "is private and was not reviewed"),
        ("aten.lstm.data", "is private and was not reviewed"),
        ("aten.from_file.default", "reads or writes files"),
        ("symm_mem.memset32_.default", "communicates with other processes|is not registered"),
        ("_c10d_functional.all_reduce.default", "communicates with other processes"),
    ],
)
def test_unknown_or_unsafe_operator_is_refused(op: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        find_operator(Signature(0, OPERATOR, op, (), {}))


def test_operators_of_other_packages_require_trust() -> None:
    with torch.library._scoped_library("strangers", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.define("write_file(str filename, Tensor x) -> ()")
        library.impl("twice", lambda x: x * 2, "CPU")
        signature = Signature(0, OPERATOR, "strangers.twice.default", (), {})
        with pytest.raises(Unsupported, match=f"is not trusted: {LOOK_FOR}"):
            find_operator(signature)
        assert find_operator(signature, ["strangers.ops"]).function is torch.ops.strangers.twice.default
        with pytest.raises(Unsupported, match="reads or writes files"):
            find_operator(Signature(0, OPERATOR, "strangers.write_file.default", (), {}), ["strangers"])


def test_private_operator_runs_if_it_was_reviewed_or_the_trace_is_trusted() -> None:
    with torch.library._scoped_library("aten", "FRAGMENT") as library:
        library.define("_unreviewed(Tensor x) -> Tensor")
        library.impl("_unreviewed", lambda x: x * 2, "CPU")
        for op in ("aten._unreviewed.default", "aten.fbgemm_linear_int8_weight_fp32_activation.default"):
            signature = Signature(0, OPERATOR, op, (), {})
            with pytest.raises(
                Unsupported, match="is private and was not reviewed: replay with --sandbox, or with --trust"
            ):
                find_operator(signature)
            assert str(find_operator(signature, InputOptions(trust=True).extensions).function) == op
        assert not is_private(torch.ops.aten.add.Tensor)
        assert is_private(torch.ops.aten.lstm.data)
    for words, trusted in (
        (["t.jsonl"], False),
        (["t.jsonl", "--sandbox"], True),
        (["--operator", "aten._softmax"], True),
    ):
        assert options_of(job_from_arguments(make_parser().parse_args(words))).inputs.trust is trusted


def test_function_of_mmcv_runs_if_it_was_reviewed_or_the_trace_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    extension = ModuleType(MMCV)
    extension.nms, extension.softnms = ord, chr  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mmcv", ModuleType("mmcv"))
    monkeypatch.setitem(sys.modules, MMCV, extension)
    assert find_operator(Signature(0, EXTENSION, f"{MMCV}:nms", (), {})).function is ord
    other = Signature(0, EXTENSION, f"{MMCV}:softnms", (), {})
    with pytest.raises(Unsupported, match="was not reviewed: replay with --sandbox, or with --trust"):
        find_operator(other)
    assert find_operator(other, InputOptions(trust=True).extensions).function is chr


def test_operators_of_the_shipped_traces_are_allowed() -> None:
    for trace in map(load, SHIPPED_TRACES):
        for signature in trace.signatures:
            if signature.kind == OPERATOR and signature.op.startswith(("aten.", "quantized.")):
                find_operator(signature)


def test_hint_names_only_installed_extensions_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages" / "fast"
    folder.mkdir(parents=True)
    for name, content in (("_C", b"\0libtorch_cpu.so\0"), ("_other", b"\0libc.so\0")):
        (folder / f"{name}{EXTENSION_SUFFIXES[0]}").write_bytes(content)
    (folder / "plain.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site-packages")

    def hint(name: str, origin: str | None = None) -> str:
        with pytest.raises(Untrusted) as refusal:
            find_operator(Signature(0, EXTENSION, name, (), {}, registered_by=origin))
        return refusal.value.with_command("t.jsonl", [])

    assert hint("fast._C:scale").endswith("run it with opreplay t.jsonl --extension fast._C")
    others = (
        "torch._C:import_ir_module",
        "fast._other:f",
        "fast.plain:f",
        "posix:system",
        "builtins:exec",
        "os:system",
        "numpy.random.mtrand:f",
    )
    assert {hint(name).partition(": ")[2] for name in others} == {LOOK_FOR}
    assert hint("__main__:f", str(folder / "plain.py")).endswith(LOOK_FOR)
    assert hint("fast.plain:f", "torch._C").endswith(LOOK_FOR)
