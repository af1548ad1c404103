"""Captures of a real GPU, and calls that run as another operator because a machine lacks their own."""

import functools
import json
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from example_trace import write
from programs import ROOT, run_command, succeed
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from opgrip.replay.cases.cases import Case
from opgrip.replay.command.run_requests import request_with
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.replay.operators import equivalents
from opgrip.replay.operators.equivalents import ATTENTIONS, MATH, Equivalent, equivalent_on
from opgrip.replay.operators.lookup import Operator, find_operator
from opgrip.replay.operators.torch_private import has_kernel_on
from opgrip.replay.results.results import OK, same_outputs
from opgrip.replay.run.preparation import prepare
from opgrip.replay.run.workload import workload_for
from opgrip.replay.sequences.call_timers import SequenceSettings
from opgrip.replay.sequences.step_replay import replay_sequence
from opgrip.traces import load
from opgrip.traces.schema.arguments import TensorSpec, leaves
from opgrip.traces.schema.records import EXTENSION, OPERATOR, Calls, Scope, Signature, Thread

H100 = ROOT / "benchmarks/results/h100/raw.zip"
FOR_CPU = "aten._scaled_dot_product_flash_attention_for_cpu"
CUDNN = "aten._scaled_dot_product_cudnn_attention"


def spec(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cuda:0", **fields: Any) -> TensorSpec:
    return TensorSpec(shape, torch.empty(shape, device="meta").stride(), dtype, device, **fields)


QUERY, KEY = spec(2, 8, 33, 16), spec(2, 2, 33, 16)
SEED = spec(dtype=torch.int64)
FORWARD = Signature(
    *(7, OPERATOR, f"{CUDNN}.default", (QUERY, KEY, KEY, None, True, 0.0, True), {"scale": 0.5}),
    (QUERY, spec(2, 8, 33, 1), None, None, 33, 33, SEED, SEED, None),
)
BACKWARD = Signature(
    *(8, OPERATOR, f"{CUDNN}_backward.default"),
    (QUERY, QUERY, KEY, KEY, QUERY, spec(2, 8, 33, 1), SEED, SEED, None, None, None, 33, 33, 0.0, True),
    {"scale": 0.5},
    (QUERY, KEY, KEY),
)


def with_dropout(signature: Signature) -> Signature:
    place = len(signature.args) - 2
    return replace(signature, args=(*signature.args[:place], 0.1, *signature.args[place + 1 :]))


def expect(equivalent: Equivalent | None) -> Equivalent:
    assert equivalent is not None
    return equivalent


@pytest.mark.parametrize("signature", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_cuda_attention_is_a_case_of_the_cpu(signature: Signature) -> None:
    for own, remark in ((signature, ""), (with_dropout(signature), ", without dropout")):
        case = Case(own, {}, 1, 0.0, 0.0, 1.0)
        ((_, row, timed_function),) = prepare(case, workload_for(request_with("none.jsonl", device="cpu")))
        assert (row.status, row.faithful) == (OK, True), row.error
        assert timed_function is not None
        assert row.op == signature.op
        assert row.key == case.key
        assert row.note == f"as {signature.op.replace('cudnn_attention', 'flash_attention_for_cpu')}{remark}"


def test_cuda_attention_flows_through_a_step_on_the_cpu(tmp_path: Path) -> None:
    copy = Signature(9, OPERATOR, "aten.exp.default", (QUERY,), {}, QUERY)
    # query, key, value, output, log sums, seeds; the backward takes all of them
    storages = [[0, 1, 2, 3, 4, 5, 6], [3, 7], [7, 0, 1, 2, 3, 4, 5, 6, 8, 9, 10]]
    calls = Calls(
        *(0, [FORWARD.number, copy.number, BACKWARD.number], [0] * 3, [0, 10, 20], [5] * 3),
        *([len(own) for own in storages], [number for own in storages for number in own]),
    )
    records = [FORWARD, copy, BACKWARD, Scope(0, "", "", "forward"), Thread(0, "MainThread"), calls]
    trace = load(write(tmp_path / "t.jsonl", records))
    settings = SequenceSettings(device_map("cuda:0", "cpu"), "cpu", repeats=3)
    result = replay_sequence(trace, settings)
    assert (result.replayed, result.calls) == (3, 3), result.not_replayed


def test_cpu_equivalent_of_attention_computes_the_same() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(item.shape, requires_grad=True) for item in (QUERY, KEY, KEY))
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.5, enable_gqa=True)
    gradient = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (query, key, value), gradient)
    with torch.no_grad():
        result, sums = run(expect(equivalent_on(FORWARD, "cpu")), [query, key, value])
        torch.testing.assert_close(result, expected)
        taken = [gradient, query, key, value, result, sums]
        torch.testing.assert_close(run(expect(equivalent_on(BACKWARD, "cpu")), taken), gradients)


def run(equivalent: Equivalent, recorded: Sequence[Tensor]) -> Any:
    """Run an equivalent on the tensors of the recorded call."""
    places = iter(equivalent.argument_indices)

    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf
        place = next(places)
        return torch.zeros(leaf.shape, dtype=leaf.dtype) if place is None else recorded[place]

    args = [tensor(leaf) for leaf in equivalent.signature.args]
    return find_operator(equivalent.signature).function(
        *args, **{name: tensor(leaf) for name, leaf in equivalent.signature.kwargs.items()}
    )


@pytest.mark.parametrize("name", ["bert", "llama", "resnet"])
def test_every_operator_of_the_h100_traces_runs_on_the_cpu(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(H100) as archive:
        path = Path(archive.extract(f"{name}.jsonl", tmp_path))
    for signature in load(path).signatures:
        function: Any = find_operator(signature).function
        equivalent = equivalent_on(signature, "cpu")
        assert equivalent is not None or has_kernel_on(function, "cpu"), signature.op


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[SDPBackend]:
    """Replace the device by one without kernels of the CPU, which chooses the last of these kinds of attention."""
    chosen: list[SDPBackend] = []
    monkeypatch.setattr(equivalents, "has_kernel_on", lambda function, kind: False)
    # torch names its choice by a number
    monkeypatch.setattr(equivalents, "_choice", lambda *call, wants_gradients: SDPBackend(int(chosen[-1])))
    return chosen


@functools.cache
def zoo_signatures() -> Sequence[Signature]:
    return load(ROOT / "traces/zoo_500.jsonl.gz").signatures


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*ATTENTIONS, SDPBackend.MATH], ids=lambda kind: kind.name)
def test_cpu_attention_runs_as_the_kernel_that_a_device_chooses(kind: SDPBackend, elsewhere: list[SDPBackend]) -> None:
    elsewhere.append(kind)
    count = 0
    for signature in zoo_signatures():
        if signature.op.startswith(FOR_CPU):
            equivalent = equivalent_on(signature, "cuda:0")
            if kind is SDPBackend.MATH and "backward" in signature.op:
                assert equivalent is None
                continue
            own = expect(equivalent).signature
            # kernels for the meta device check arguments, and compute the shapes of results
            results = find_operator(own).function(*on_meta(own.args), **on_meta(own.kwargs))
            assert same_outputs(own.outputs, list(leaves(results)), unused=expect(equivalent).unused)
            assert own.op.removeprefix("aten.").startswith(ATTENTIONS.get(kind, MATH))
            if kind is SDPBackend.EFFICIENT_ATTENTION and "backward" in own.op:
                # CUDA's kernel refuses rows of logarithms that do not begin at multiples of 8 elements
                sums: Any = own.args[6]
                assert [step % 8 for step in sums.stride[:-1]] == [0, 0]
            assert expect(equivalent).note == f"as {own.op}"
            count += 1
    assert count > 40


def on_meta(tree: Any) -> Any:
    def meta(leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride or (), dtype=leaf.dtype, device="meta")

    return (
        {name: meta(leaf) for name, leaf in tree.items()} if isinstance(tree, dict) else [meta(leaf) for leaf in tree]
    )


def test_cudnn_batch_norm_runs_as_native_batch_norm() -> None:
    image, channel = spec(4, 3, 5, 5), spec(3)
    reserve = spec(0, dtype=torch.uint8)
    forward = Signature(
        *(0, OPERATOR, "aten.cudnn_batch_norm.default", (image, channel, channel, channel, channel, True, 0.1, 1e-5)),
        *({}, (image, channel, channel, reserve)),
    )
    backward = Signature(
        *(1, OPERATOR, "aten.cudnn_batch_norm_backward.default"),
        (image, image, channel, channel, channel, channel, channel, 1e-5, reserve),
        *({}, (image, channel, channel)),
    )
    first, second = (expect(equivalent_on(signature, "cpu")) for signature in (forward, backward))
    assert (first.argument_indices, second.argument_indices) == ((0, 1, 2, 3, 4), (1, 0, 2, 3, 4, 5, 6))
    assert first.memory_of((10, 11, 12, 13, 14), (15, 16, 17, 18)) == ((10, 11, 12, 13, 14), (15, 16, 17))
    for equivalent in (first, second):
        inputs = Inputs(equivalent.signature.args, {}, {}, device_map("cuda:0", "cpu"), 0)
        results = find_operator(equivalent.signature).function(*inputs.make()[0])
        assert same_outputs(equivalent.signature.outputs, results)


def test_norms_of_16_bits_have_the_statistics_dtype_of_the_device() -> None:
    rows, row, column = (spec(4, 8, dtype=torch.bfloat16), spec(8, dtype=torch.bfloat16), spec(4, 1))
    forward = Signature(
        *(0, OPERATOR, "aten.native_layer_norm.default", (rows, [8], row, row, 1e-5), {}, (rows, column, column)),
    )
    backward = Signature(
        *(1, OPERATOR, "aten.native_layer_norm_backward.default"),
        *((rows, rows, [8], column, column, row, row, [True, True, True]), {}, (rows, row, row)),
    )
    assert equivalent_on(forward, "cuda:0") is equivalent_on(backward, "cuda:0") is None
    for signature in (forward, backward):
        case = Case(signature, {}, 1, 0.0, 0.0, 1.0)
        ((_, result, _),) = prepare(case, workload_for(request_with("none.jsonl", device="cpu")))
        assert (result.status, result.faithful, result.note) == (OK, True, "statistics in bfloat16"), result.error
        own = expect(equivalent_on(signature, "cpu"))
        assert own.argument_indices == tuple(range(len(own.argument_indices)))
        back = expect(equivalent_on(own.signature, "cuda:0"))
        assert (back.signature, back.note) == (signature, "statistics in float32")


@pytest.mark.parametrize("op", [f"{CUDNN}.default", f"{FOR_CPU}.default", "mmcv._ext:nms", "mmcv._ext:no_such"])
def test_malformed_calls_have_no_equivalent(op: str, elsewhere: list[SDPBackend]) -> None:
    elsewhere.append(SDPBackend.FLASH_ATTENTION)
    kind = EXTENSION if ":" in op else OPERATOR
    for args in ((), (1, 2, 3), (spec(2), spec(2), spec(2)), (None,) * 3, ([QUERY],) * 3):
        assert equivalent_on(Signature(0, kind, op, args), "cuda:0") is None


# schemas of torchvision's operators
SCHEMAS = (
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "SymInt batch_size, SymInt channels, SymInt height, SymInt width, int sampling_ratio, bool aligned) -> Tensor",
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
    "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, "
    "SymInt offset_groups, bool use_mask) -> Tensor",
    "_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, "
    "SymInt groups, SymInt offset_groups, bool use_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
REGION = {"aligned_height": 7, "aligned_width": 5, "spatial_scale": 0.25, "sampling_ratio": 2, "pool_mode": 1}
REGION = {**REGION, "aligned": True}
IMAGE, ROIS, REGIONS, EMPTY = spec(2, 8, 20, 30), spec(3, 5), spec(3, 8, 7, 5), spec(0)
WEIGHT, OFFSET, MASK, RESULT = spec(16, 8, 3, 3), spec(2, 18, 10, 15), spec(2, 9, 10, 15), spec(2, 16, 10, 15)
STEPS = {"kernel_h": 3, "kernel_w": 3, "stride_h": 2, "stride_w": 3, "pad_h": 1, "pad_w": 4, "dilation_h": 5}
STEPS = {**STEPS, "dilation_w": 6, "group": 1, "deformable_group": 1}
OLD_STEPS = {"kW": 3, "kH": 3, "dW": 3, "dH": 2, "padW": 4, "padH": 1, "dilationW": 6, "dilationH": 5}
OLD_STEPS = {**OLD_STEPS, "group": 1, "deformable_group": 1, "im2col_step": 2}
NUMBERS = (2, 3, 1, 4, 5, 6, 1, 1)
NO_MASK, BIAS = spec(2, 1), spec(16)


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the lookup of operators by one that knows torchvision's, without mmcv."""
    schemas = {text.partition("(")[0]: torch._C.parse_schema(f"torchvision::{text}") for text in SCHEMAS}

    class Overload:
        def __init__(self, name: str) -> None:
            self._schema = schemas[name]

        def __call__(self) -> None: ...

    def find(signature: Signature) -> Operator:
        return Operator(Overload(signature.op.split(".")[1]), mutates=False)

    monkeypatch.setattr(equivalents, "find_operator", find)
    monkeypatch.setattr(equivalents, "is_installed", lambda name: False)


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize(
    ("name", "args", "kwargs", "op", "expected"),
    [
        (
            *("nms", (spec(9, 4), spec(9)), {"iou_threshold": 0.7, "offset": 0}),
            *("nms", (spec(9, 4), spec(9), 0.7)),
        ),
        (
            *("roi_align_forward", (IMAGE, ROIS, REGIONS, EMPTY, EMPTY), REGION),
            *("roi_align", (IMAGE, ROIS, 0.25, 7, 5, 2, True)),
        ),
        (
            *("roi_align_backward", (REGIONS, ROIS, EMPTY, EMPTY, IMAGE), REGION),
            *("_roi_align_backward", (REGIONS, ROIS, 0.25, 7, 5, 2, 8, 20, 30, 2, True)),
        ),
        (
            *("deform_conv_forward", (IMAGE, WEIGHT, OFFSET, RESULT, EMPTY, EMPTY), OLD_STEPS),
            *("deform_conv2d", (IMAGE, WEIGHT, OFFSET, NO_MASK, BIAS, *NUMBERS, False)),
        ),
        (
            *("deform_conv_backward_input", (IMAGE, OFFSET, RESULT, IMAGE, OFFSET, WEIGHT, EMPTY), OLD_STEPS),
            *("_deform_conv2d_backward", (RESULT, IMAGE, WEIGHT, OFFSET, NO_MASK, BIAS, *NUMBERS, False)),
        ),
        (
            *("deform_conv_backward_parameters", (IMAGE, OFFSET, RESULT, WEIGHT, EMPTY, EMPTY), OLD_STEPS),
            *("_deform_conv2d_backward", (RESULT, IMAGE, WEIGHT, OFFSET, NO_MASK, BIAS, *NUMBERS, False)),
        ),
        (
            "modulated_deform_conv_forward",
            (IMAGE, WEIGHT, BIAS, EMPTY, OFFSET, MASK, RESULT, EMPTY),
            {**STEPS, "with_bias": True},
            *("deform_conv2d", (IMAGE, WEIGHT, OFFSET, MASK, BIAS, *NUMBERS, True)),
        ),
        (
            "modulated_deform_conv_backward",
            (IMAGE, WEIGHT, EMPTY, EMPTY, OFFSET, MASK, EMPTY, IMAGE, WEIGHT, EMPTY, OFFSET, MASK, RESULT),
            {**STEPS, "with_bias": False},
            *("_deform_conv2d_backward", (RESULT, IMAGE, WEIGHT, OFFSET, MASK, BIAS, *NUMBERS, True)),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mmcv_functions_run_as_torchvision_operators(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], op: str, expected: tuple[Any, ...]
) -> None:
    equivalent = expect(equivalent_on(Signature(0, EXTENSION, f"mmcv._ext:{name}", args, kwargs, None), "cpu"))
    assert equivalent.signature.op == f"torchvision.{op}.default"
    assert equivalent.signature.args == expected
    assert equivalent.note.startswith(f"as torchvision.{op}.default")


@pytest.mark.usefixtures("torchvision")
def test_mmcv_variants_missing_in_torchvision_have_no_equivalent() -> None:
    largest = Signature(
        *(0, EXTENSION, "mmcv._ext:roi_align_forward"),
        *((IMAGE, ROIS, REGIONS, REGIONS, REGIONS), {**REGION, "pool_mode": 0}),
    )
    pixels = Signature(0, EXTENSION, "mmcv._ext:nms", (spec(9, 4), spec(9)), {"iou_threshold": 0.7, "offset": 1})
    assert equivalent_on(largest, "cpu") is equivalent_on(pixels, "cpu") is None


KEPT = ROOT / "benchmarks/results/h100/raw.zip"
# operators whose calls take a CPU microseconds, and one that has no kernel for it
SMALL = ("aten.add*", "aten.cat*", "aten.embedding*", "*cudnn_attention*")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    with zipfile.ZipFile(KEPT) as archive:
        for name in ("clocks-kernels.jsonl", "bert.jsonl", "replay-llama.json", "graph-llama.json"):
            archive.extract(name, tmp_path)
    return tmp_path


def test_gpu_trace_info_shows_device_and_driver(kept: Path) -> None:
    shown = run_command("opgrip", "trace", "info", kept / "bert.jsonl").stdout
    assert "cuda:0: NVIDIA H100 80GB HBM3" in shown
    assert "driver 580.159.04" in shown
    assert "calls       10,224" in shown
    assert "times are device times for calls that ran on a device" in shown


@pytest.mark.slow
def test_gpu_calls_are_replayed_on_a_cpu(kept: Path) -> None:
    rows = kept / "rows.json"
    patterns = [word for pattern in SMALL for word in ("--op", pattern)]
    words = ("--device", "cpu", *patterns, "--top", 5, "--budget", 0.02, "-o", rows)
    succeed("opreplay", kept / "clocks-kernels.jsonl", *words)
    results = json.loads(rows.read_text())["results"]
    statuses = sorted((row["op"], row["status"].replace("contended", "ok")) for row in results)
    assert statuses == [
        ("aten._scaled_dot_product_cudnn_attention.default", "unsupported"),
        ("aten.add.Tensor", "ok"),
        ("aten.add.Tensor", "ok"),
        ("aten.cat.default", "ok"),
        ("aten.embedding.default", "ok"),
    ]
    assert {row["device"] for row in results} == {"cpu"}
    # by the device's own records: far below the time of a launch
    assert min(row["captured_us"] for row in results if row["op"] == "aten.add.Tensor") < 2


def test_gpu_replays_are_compared(kept: Path) -> None:
    done = succeed("opgrip", "compare", kept / "replay-llama.json", kept / "graph-llama.json")
    assert "60 cases timed in both: " in done.stdout
    assert ", 124 missing" in done.stdout
