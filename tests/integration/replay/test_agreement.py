"""Tests of arguments whose sizes operators assume to agree."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from example_trace import write
from programs import run_command, succeed
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.replay import Results
from opgrip.replay.operators.admission import MMCV, Unsupported
from opgrip.replay.operators.agreement import CHECKS, REVIEWED, check_agreement, check_graph, check_parts
from opgrip.replay.operators.agreement.indices import bound_indices, bounded_arguments, bounding, check_indices
from opgrip.replay.operators.agreement.sizes import required_sizes
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import OPERATOR, Calls, End, Record, Scope, Signature, Values
from opgrip.traces.values.exact import Constant

ATEN = torch.ops.aten
ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-3, "amsgrad": False, "maximize": False}
SGD = {
    "weight_decay": 0.0,
    "momentum": 0.9,
    "lr": 0.1,
    "dampening": 0.0,
    "nesterov": False,
    "maximize": False,
    "is_first_step": False,
}
BATCH_NORM = (True, 0.1, 1e-5)

TABLE = torch.zeros(10, 12, dtype=torch.uint8)


def f(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def n(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def one(*shape: int) -> torch.Tensor:
    return torch.zeros(()).expand(shape)


def bags() -> list[Any]:
    return [n(0), n(2), n(2), 10, False, 0, False, None]


OUT = {"grad_input": one(1, 2, 2, 2)}


def encoder(heads: int, bias: torch.Tensor) -> tuple[Any, ...]:
    weights = (f(24, 8), bias, f(8, 8), f(8), False, False, 1e-5, *(f(8) for _ in range(4)))
    return (f(2, 5, 8), 8, heads, *weights, f(16, 8), f(16), f(8, 16), f(8))


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "message"),
    [
        (
            "_fused_adam_",
            ([f(64)], [f(64)], [f(1)], [f(64)], [], [f()]),
            ADAM,
            r"exp_avgs has \(1,\) instead of \(64,\)",
        ),
        ("_fused_adam_", ([f(64)], [f(64)], [], [f(64)], [], [f()]), ADAM, "number of exp_avgs has 0 instead of 1"),
        ("_fused_sgd_", ([f(64)], [f(64)], [f(1)]), SGD, "momentum_buffer_list"),
        (
            "upsample_nearest2d",
            (f(1, 1, 3, 3), [7, 7], 1e-25, 1e-25),
            {},
            r"is_scale\(scales_h, sizes\[-2\], output_size\[-2\]\)` is false",
        ),
        ("upsample_bilinear2d", (f(1, 1, 3, 3), [7, 7], False, float("nan"), 2.0), {}, r"is_scale\(scales_h"),
        ("native_batch_norm", (f(1, 64, 1, 1), f(1), None, None, None, *BATCH_NORM), {}, "weight has 1 instead of 64"),
        ("native_batch_norm", (f(1, 64, 1, 1), None, None, None, None, False, 0.1, 1e-5), {}, "running_mean"),
        ("native_batch_norm", (f(1, 64, 1, 1), None, None, None, None, None, 0.1, 1e-5), {}, "running_mean"),
        ("native_batch_norm_backward", (f(1, 4), f(1, 4), *[None] * 5, True, 1e-5, [True] * 3), {}, "save_mean"),
        (
            "convolution_backward",
            (f(0, 4, 3), f(1, 3, 5), f(4, 3, 3), [4], [1], [0], [1], False, [0], 1, [True] * 3),
            {},
            "grad_output",
        ),
        ("batch_norm_backward", (f(1, 4), f(1, 4), *[None] * 5, False, 1e-5, [True] * 3, f(0)), {}, "running_mean"),
        (
            "convolution_backward",
            (*(f(1, 1, 4, 4),) * 3, None, [2, 2], [0, 0], [1, 1], True, [1 << 40, 0], 1, [True] * 3),
            {},
            "output_padding",
        ),
        ("native_group_norm", (f(1, 2, 2), None, None, 1, 2, 10**8, 1, 1e-5), {}, r"N \* C \* HxW"),
        ("native_group_norm", (f(1, 2, 2), None, None, 1, 2, 2, 0, 1e-5), {}, "C % group"),
        ("native_layer_norm", (f(2, 3), [3], f(1), None, 1e-5), {}, "weight"),
        ("_weight_norm_interface", (f(64, 2), f(1), 0), {}, "g has 1 instead of 64"),
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            (f(5, 2, 4, 4), f(1, 2, 4, 4), f(1, 2, 4, 4)),
            {},
            r"key has \(1, 2, 4, 4\) instead of \(5, 2, 4, 4\)",
        ),
        ("_adaptive_avg_pool2d_backward", (f(1, 1, 1, 1), f(5, 5, 5, 5)), {}, "grad_output"),
        ("grid_sampler_2d_backward", (f(1, 1, 1, 1), f(1, 1, 4, 4), f(1, 9, 9, 2), 0, 0, False, []), {}, "grad_output"),
        ("_cdist_backward", (f(1), f(4, 2), f(4, 2), 1.0, f(1)), {}, "cdist"),
        ("_pdist_backward", (f(1), f(5, 2), 2.0, f(10)), {}, "grad"),
        ("_pdist_backward", (f(0), f(0, 2), 2.0, f(0)), {}, "rows > 0"),
        (
            "_cdist_backward",
            (f(3, 5), f(3, 3, 4), f(5, 4), 2.0, f(3, 5)),
            {},
            r"cdist has \(3, 5\) instead of 3 dimensions",
        ),
        ("avg_pool2d_backward", (f(3, 3, 1, 4), f(2, 3, 1, 8), [1, 2], [1, 2], [0, 0], False, True), {}, "grad_output"),
        (
            "max_pool3d_with_indices_backward",
            (f(1, 1, 2, 2, 2), f(1, 1, 4, 4, 4), [2], [], [0], [1], False, n(1, 1, 2, 2, 1)),
            {},
            "indices",
        ),
        ("adaptive_max_pool2d_backward", (f(2, 3, 1, 2), f(1, 3, 1, 8), n(2, 3, 1, 2)), {}, "grad_output"),
        ("adaptive_max_pool3d_backward", (f(1, 2, 2, 2), f(1, 0, 8, 8), n(1, 2, 2, 2)), {}, r"elements\(self\) > 0"),
        ("fractional_max_pool3d_backward", (f(1, 2, 2, 2), f(2, 4, 4, 4), [2], [2], n(1, 2, 2, 2)), {}, "grad_output"),
        ("_adaptive_avg_pool2d", (f(1, 4, 4), [2]), {}, r"len\(output_size\) == 2"),
        ("reflection_pad1d_backward", (f(1, 3, 11), f(2, 3, 8), [1, 2]), {}, "grad_output"),
        ("replication_pad3d_backward", (f(1, 5, 5, 5), f(2, 3, 3, 3), [1] * 6), {}, "grad_output"),
        ("unfold_backward", (f(3, 3, 1), [3, 8], 1, 3, 2), {}, r"grad_in has \(3, 3, 1\) instead of \(3, 3, 3\)"),
        ("_log_softmax_backward_data", (f(10, 3), f(9, 3), -1, torch.float32), {}, "grad_output"),
        (
            "_segment_reduce_backward",
            (f(1, 3), f(3, 3), f(6, 3), "sum"),
            {"lengths": torch.tensor([2, 3, 1])},
            "grad has",
        ),
        ("_ctc_loss", (f(9, 3, 6), n(9), [9, 9, 10], [4, 3, 2]), {}, r"are_lengths\(input_lengths"),
        ("_ctc_loss", (f(9, 3, 6), n(9), [9, 9, 9], [4, 3, 3]), {}, r"sum\(target_lengths\)"),
        ("_ctc_loss_backward", (f(3), f(9, 3, 6), n(9), [9] * 3, [4, 3, 2], f(3), f(3, 9, 9), -1), {}, "blank"),
        ("_ctc_loss_backward", (f(3), f(9, 3, 6), n(9), [9] * 3, [4, 3, 2], f(3), f(3, 9, 7), 0), {}, "states // 2"),
        ("nll_loss_backward", (f(2), f(2, 0), n(2), None, 0, -100, f()), {}, r"elements\(target\)"),
        ("multi_margin_loss_backward", (f(1), f(10, 5), n(10), 1, 1.0, None, 0), {}, "grad_output has 1 instead of 10"),
        (
            "_embedding_bag_backward",
            (f(1, 8), n(12), n(3), n(0), n(3), n(3), 10, False, 0, False, None),
            {},
            "bag_size",
        ),
        ("_embedding_bag", (f(10, 8), n(12), n(0)), {}, r"elements\(offsets\) > 0"),
        ("_transform_bias_rescale_qkv", (f(2, 5, 48), f(24), 2), {}, "qkv_bias"),
        ("_transformer_encoder_layer_fwd", encoder(2, torch.zeros(24, dtype=torch.uint8)), {}, "qkv_bias"),
        ("_transformer_encoder_layer_fwd", encoder(0, f(24)), {}, "embed_dim % heads"),
        ("_weight_int4pack_mm_for_cpu", (f(4, 64), n(64, 32), 32, f(1, 64, 2)), {}, "qScaleAndZeros"),
        ("_dyn_quant_matmul_4bit", (f(4, 32), f(1056), 64, 64, 32), {}, "inp"),
        (
            "_fused_moving_avg_obs_fq_helper",
            (f(5, 6), n(1), n(1), f(4), f(4), f(4), n(4), 0.1, 0, 255, 0, True),
            {},
            "scale",
        ),
        ("linalg_ldl_solve", (f(2, 5, 5), n(2, 5), f(3, 2, 5, 1)), {}, "broadcast"),
        ("lu_unpack", (f(1, 4, 4), n(2, 4)), {}, "LU_pivots"),
        ("_spdiags", (f(2, 4), n(2), [-1, 4]), {}, r"min\(shape\) >= 0"),
        ("_convert_indices_from_coo_to_csr", (n(3), -1), {}, "size"),
        ("_sparse_mm_reduce_impl_backward", (f(5, 5), f(5, 3), f(5, 3), "amax", n(1, 3), [True] * 2), {}, "arg_out"),
        ("_fft_r2c", (f(4, 6), [2**31], 0, True), {}, "are_dimensions"),
        ("_fft_c2c", (f(4, 6), [1, 1], 0, True), {}, "are_dimensions"),
        ("_fft_c2r", (f(4, 4), [1], 2, 3), {}, "last_dim_size // 2"),
        ("rrelu_with_noise", (f(3, 4), torch.zeros(3, 4, dtype=torch.uint8), 0.1, 0.3, True), {}, "dtype of noise"),
        ("_fused_sgd_", ([one(8)], [f(8)], [f(8)]), SGD, "elements of self in memory has 1 instead of 8"),
        ("native_group_norm", (f(2, 4, 3), one(4), None, 2, 4, 3, 2, 1e-5), {}, "weight in memory"),
        ("_weight_norm_interface", (one(3, 4), f(3, 1)), {}, "v in memory"),
        ("_embedding_bag", (f(10, 8), one(12).long().expand(12), n(1)[:1].expand(3)), {}, "offsets in memory"),
        ("as_strided_", (f(8), [4, 2], [2**62, 1]), {}, "last_place"),
        ("empty_strided", ([4, 2], [2**62, 1]), {}, "last_place"),
        (
            "adaptive_max_pool3d_backward.grad_input",
            (f(1, 2, 2, 2),) * 2 + (n(1, 2, 2, 2),),
            OUT,
            "grad_input in memory",
        ),
        ("median.dim", (one(4, 5), 1), {}, "self in memory"),
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            (f(2, 4, 6, 8), f(2, 4, 6, 1).expand(2, 4, 6, 8), f(2, 4, 6, 8)),
            {},
            "last stride of key has 0 instead of 1",
        ),
        (
            "mkldnn_rnn_layer",
            (f(2, 1, 4), f(256, 4), f(256, 64), f(256), f(256), f(1, 1), f(1, 1), False, [], 2, 64, 1)
            + (True, False, False, False),
            {},
            "hx_ has 1 instead of 64",
        ),
        ("gru.input", (f(5, 2, 4), f(1, 2, 1), [f(1, 4), f(1, 1)], False, 1, 0.0, False, False, False), {}, "params"),
        ("gru.data", (f(5, 4), n(3), f(1, 2, 6), [f(18, 4)], False, 1 << 40, 0.0, False, False), {}, "num_layers"),
    ],
)
def test_inconsistent_sizes_are_refused(op: str, args: Any, kwargs: dict[str, Any], message: str) -> None:
    packet, _, overload = op.partition(".")
    if not hasattr(ATEN, packet):
        pytest.skip(f"torch {torch.__version__} has no {op}")
    with pytest.raises(Unsupported, match=message):
        check_agreement(getattr(getattr(ATEN, packet), overload or "default"), args, kwargs)


@pytest.mark.parametrize("sizes", [n(1).expand(3), n(0)], ids=["one element", "empty"])
@pytest.mark.parametrize("op", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_sizes_of_packed_sequences_have_their_own_memory(op: str, sizes: torch.Tensor) -> None:
    with pytest.raises(Unsupported, match="batch_sizes"):
        check_agreement(getattr(ATEN, op).data, (f(6, 3), sizes, f(1, 3, 4), [], True, 1, 0.0, False, False), {})


ROI_POOL = """_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, float spatial_scale, SymInt pooled_height,
SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width) -> Tensor"""


def test_gradients_of_regions_stay_in_the_image() -> None:
    if hasattr(torch.ops.torchvision, "_roi_pool_backward"):
        pytest.skip("torchvision is installed")
    with torch.library._scoped_library("torchvision", "FRAGMENT") as library:
        library.define(ROI_POOL)
        function = torch.ops.torchvision._roi_pool_backward.default
        places, rois = torch.full((1, 1, 2, 2), 10**8, dtype=torch.int32), torch.tensor([[7, torch.nan, 1e30, 0, 3]])
        args = (f(1, 1, 2, 2), rois, places, 1.0, 2, 2, 1, 1, 4, 4)
        check_agreement(function, args, {})
        bound_indices(function, args, {})
        assert places.unique().tolist() == [15]
        assert rois.tolist() == [[0, 0, 1e4, 0, 3]]
        for place, other in ((0, f(1, 1, 3, 2)), (2, places[..., :1].expand(1, 1, 2, 2)), (3, float("nan")), (8, 0)):
            with pytest.raises(Unsupported):
                check_agreement(function, (*args[:place], other, *args[place + 1 :]), {})


def test_regions_are_of_images_of_the_batch_however_they_are_passed() -> None:
    if hasattr(torch.ops.torchvision, "roi_align"):
        pytest.skip("torchvision is installed")
    with torch.library._scoped_library("torchvision", "FRAGMENT") as library:
        library.define("roi_align(Tensor input, Tensor rois, float spatial_scale) -> Tensor")
        rois = torch.full((9, 5), 8.0)
        call = {"rois": rois, "input": f(2, 3, 4, 4), "spatial_scale": 1.0}
        bound_indices(torch.ops.torchvision.roi_align.default, (), call)
        assert rois[:, 0].unique().tolist() == [1]


def mmcv_function(name: str, arguments: str) -> Any:
    function = BuiltinFunction(f"{name}({', '.join(f'{word}: int' for word in arguments.split())}) -> None")
    function.__name__, function.__module__ = name, MMCV
    return function


class BuiltinFunction:
    """A function as mmcv's extension has them, without mmcv."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc


REGION = {"aligned_height": 2, "aligned_width": 3, "spatial_scale": 0.5, "sampling_ratio": 2, "pool_mode": 0}
TABLE_OF_MMCV: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "nms": ("boxes scores", {"boxes": f(6, 4), "scores": f(6)}, [{"scores": f(7)}, {"boxes": f(6, 5)}]),
    "roi_align_forward": (
        "input rois output argmax_y argmax_x aligned_height aligned_width spatial_scale sampling_ratio pool_mode",
        {
            "input": f(2, 3, 8, 9),
            "rois": f(2, 5),
            **{name: f(2, 3, 2, 3) for name in ("output", "argmax_y", "argmax_x")},
        }
        | REGION,
        [{"output": f(2, 3, 2, 2)}, {"argmax_x": f(0)}, {"input": f(2, 3, 1, 1).expand(2, 3, 8, 9)}, {"rois": f(9, 5)}]
        + [{"sampling_ratio": 1 << 20}, {"input": f(2, 3, 0, 9)}],
    ),
    "psamask_forward": (
        "input output num_ h_feature w_feature h_mask w_mask",
        {"input": f(2, 15, 2, 3), "output": f(2, 6, 2, 3), "num_": 2, "h_feature": 2, "w_feature": 3}
        | {"h_mask": 3, "w_mask": 5},
        [{"num_": 3}, {"h_mask": 4}, {"output": f(2, 6, 2, 2)}],
    ),
    "modulated_deform_conv_forward": (
        "input weight offset mask output kernel_h kernel_w stride_h stride_w pad_h pad_w dilation_h dilation_w group "
        "deformable_group",
        {"input": f(2, 4, 8, 9), "weight": f(5, 4, 2, 3), "offset": f(2, 24, 3, 9), "mask": f(2, 12, 3, 9)}
        | {"output": f(2, 5, 3, 9), "kernel_h": 2, "kernel_w": 3, "stride_h": 2, "stride_w": 1, "pad_h": 0, "pad_w": 1}
        | {"dilation_h": 2, "dilation_w": 1, "group": 1, "deformable_group": 2},
        [{"offset": f(2, 24, 3, 8)}, {"mask": f(2, 6, 3, 9)}, {"deformable_group": 3}, {"stride_h": 0}, {"pad_h": 9}]
        + [{"input": f(2, 1, 1, 1).expand(2, 4, 8, 9)}],
    ),
}


@pytest.mark.parametrize("name", TABLE_OF_MMCV)
def test_functions_of_mmcv_get_sizes_that_agree(name: str) -> None:
    arguments, call, others = TABLE_OF_MMCV[name]
    function = mmcv_function(name, arguments)
    check_agreement(function, tuple(call.values())[:2], dict([*call.items()][2:]))
    for other in others:
        with pytest.raises(Unsupported):
            check_agreement(function, (), call | other)
    if "rois" in call:
        rois = torch.full((2, 5), 9.0)
        bound_indices(function, (), call | {"rois": rois})
        assert rois[:, 0].unique().tolist() == [1]
        with pytest.raises(Unsupported, match="may write into rois"):
            bound_indices(function, (), call | {"rois": rois, "argmax_y": rois})


def test_operator_that_may_write_its_indices_is_refused() -> None:
    memory = torch.zeros(512, dtype=torch.int64)
    index, output = memory[:128].view(1, 4, 4, 8), memory.view(torch.float32)[:512].view(1, 4, 8, 16)
    arguments = (f(1, 4, 4, 8), f(1, 4, 8, 16), [2, 2], [2, 2], [0, 0], [1, 1], False, index)
    function = ATEN.max_pool2d_with_indices_backward.grad_input
    bound_indices(function, arguments, {"grad_input": output.clone()})
    with pytest.raises(Unsupported, match="it may write into indices"):
        bound_indices(function, arguments, {"grad_input": output})


@pytest.mark.parametrize("changes", [{"sampling_ratio": 1 << 20}, {"pooled_height": 1 << 15}])
def test_table_of_regions_has_no_more_entries_than_an_integer_counts(changes: dict[str, int]) -> None:
    sizes = {"spatial_scale": 0.25, "pooled_height": 7, "pooled_width": 7, "sampling_ratio": 2}
    call = {"input": f(1, 4, 9, 9), "rois": f(3, 5), **sizes}
    name = "torchvision::roi_align"
    assert all(actual == expected for _, actual, expected in required_sizes(name, call, CHECKS[name]))
    assert any(actual != expected for _, actual, expected in required_sizes(name, call | changes, CHECKS[name]))


def test_gradients_of_deformable_convolutions_have_the_sizes_of_the_forward() -> None:
    tensors = {"grad": f(2, 4, 5, 5), "input": f(2, 6, 7, 7), "weight": f(4, 3, 3, 3), "offset": f(2, 36, 5, 5)}
    sizes = dict.fromkeys(("stride_h", "stride_w", "dilation_h", "dilation_w"), 1)
    call = {**tensors, "mask": f(2, 18, 5, 5), "bias": f(4), **sizes, "groups": 2, "offset_groups": 2, "use_mask": True}
    name = "torchvision::_deform_conv2d_backward"
    assert all(actual == expected for _, actual, expected in required_sizes(name, call, CHECKS[name]))
    for changes in ({"offset": f(2, 18, 5, 5)}, {"mask": f(2, 18, 5, 4)}, {"grad": f(3, 4, 5, 5)}, {"stride_h": 0}):
        checks = required_sizes(name, {**call, **changes}, CHECKS[name])
        assert any(actual != expected for _, actual, expected in checks)


def test_lstm_backward_requires_the_workspace_of_its_forward() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    states = (f(2, 6), f(2, 6), f(5, 2, 6), f(2, 6), f(2, 6), f(5, 2, 6), None, None)
    args = (f(5, 2, 4), f(24, 4), f(24, 6), f(24), f(24), *states)
    with pytest.raises(Unsupported, match=r"workspace has \(1,\) instead of"):
        check_agreement(
            ATEN.mkldnn_rnn_layer_backward.default,
            (*args, False, 2, 6, 1, True, True, False, [], False, torch.zeros(1, dtype=torch.uint8)),
            {},
        )


def test_packed_embedding_arguments_are_checked_against_the_table() -> None:
    lookup = torch.ops.quantized.embedding_bag_4bit_rowwise_offsets.default
    with pytest.raises(Unsupported, match="per_sample_weights"):
        check_agreement(lookup, (TABLE, n(4), n(2), False, 0, False, f(1)), {})
    offsets, rows = torch.tensor([-5000, 10**9]), torch.tensor([-100, 10**9], dtype=torch.int32)
    bound_indices(lookup, (TABLE, n(4), offsets, False, 0, True, None, rows), {})
    assert (offsets.tolist(), rows.tolist()) == ([0, 4], [-1, 9])


class _Checking(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check_agreement(function, args, kwargs or {})
        check_indices(function, args, kwargs or {})
        self.names |= {function._schema.name} & set(CHECKS)
        return function(*args, **(kwargs or {}))


def image() -> torch.Tensor:
    return torch.rand(2, 4, 6, 6, requires_grad=True)


def bag(offsets: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.embedding_bag(torch.arange(12) % 10, torch.rand(10, 8, requires_grad=True), offsets, **options)


def sparse(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows).to_sparse_csr().requires_grad_()


def concatenated(*lengths: int) -> torch.Tensor:
    scores = torch.rand(9, len(lengths), 6, requires_grad=True)
    targets, times = torch.arange(sum(lengths)) % 6, torch.full((len(lengths),), 9)
    return F.ctc_loss(scores, targets, times, torch.tensor(lengths), zero_infinity=True)


def step(optimizer: type[torch.optim.Optimizer], **options: Any) -> torch.Tensor:
    model = nn.Linear(3, 4)
    model(torch.rand(2, 3)).sum().backward()
    optimizer(model.parameters(), fused=True, **options).step()  # type: ignore[call-arg]
    return torch.zeros(1, requires_grad=True)


@pytest.mark.parametrize(
    "program",
    [
        lambda: step(torch.optim.Adam, amsgrad=True),
        lambda: step(torch.optim.AdamW),
        lambda: step(torch.optim.SGD, lr=0.1, momentum=0.9),
        lambda: step(torch.optim.SGD, lr=0.1),
        lambda: step(torch.optim.Adagrad),
        lambda: nn.BatchNorm2d(4)(image()),
        lambda: nn.BatchNorm2d(4).eval()(image()),
        lambda: nn.InstanceNorm2d(4)(image()),
        lambda: nn.GroupNorm(2, 4)(image()),
        lambda: nn.LayerNorm(6)(image()),
        lambda: F.interpolate(image(), scale_factor=1.7),
        lambda: F.interpolate(image(), scale_factor=0.3, mode="bilinear", antialias=True),
        lambda: F.interpolate(image(), size=(5, 9), mode="bicubic"),
        lambda: F.scaled_dot_product_attention(image(), image(), image()),
        lambda: F.scaled_dot_product_attention(image(), image()[:, :2], image()[:, :2], enable_gqa=True),
        lambda: F.grid_sample(image(), torch.rand(2, 3, 3, 2)),
        lambda: F.adaptive_avg_pool2d(image(), 2),
        lambda: torch.cdist(image(), image()),
        lambda: F.pdist(image()[0, 0]),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))(image()),
        lambda: nn.LSTM(4, 6, num_layers=2, bidirectional=True)(torch.rand(5, 2, 4))[0],
        lambda: nn.LSTM(4, 6, bias=False)(torch.rand(5, 2, 4))[0],
        lambda: F.max_pool2d(image(), 3, stride=2, padding=1, return_indices=True)[0],
        lambda: F.max_pool3d(image(), 2, ceil_mode=True),
        lambda: F.avg_pool2d(image(), 4, ceil_mode=True, count_include_pad=False),
        lambda: F.adaptive_max_pool2d(image(), (3, 2)),
        lambda: F.fractional_max_pool2d(image(), 2, output_size=3),
        lambda: F.pad(image(), (1, 2, 2, 1), mode="reflect"),
        lambda: F.pad(image()[0], (1, 2), mode="replicate"),
        lambda: image().unfold(2, 3, 2),
        lambda: image().log_softmax(1),
        lambda: torch.segment_reduce(image()[0, 0], "max", offsets=torch.tensor([0, 2, 5, 6])),
        lambda: F.ctc_loss(torch.rand(9, 3, 6, requires_grad=True), torch.ones(9).int(), (9, 8, 9), (4, 3, 2)),
        lambda: concatenated(3, 2, 1, 0),
        lambda: torch.sparse.mm(sparse([[0.0, 1.0], [0.0, 0.0]]), torch.rand(2, 3), "amax"),
        lambda: F.nll_loss(image(), torch.tensor([[[0, 3, -100] * 2] * 6] * 2)),
        lambda: F.multi_margin_loss(image()[0, 0], torch.arange(6)),
        lambda: bag(torch.tensor([0, 4, 9])),
        lambda: bag(torch.tensor([0, 4, 12]), include_last_offset=True, mode="max"),
        lambda: torch.fft.irfft(torch.fft.rfft(image())) * torch.rand(6),
        lambda: F.rrelu(image(), training=True),
        lambda: torch.stack(torch.lu_unpack(*torch.linalg.lu_factor(image()))[1:]),
        lambda: image().median(-1).values,
        lambda: image() + torch.linalg.ldl_solve(*torch.linalg.ldl_factor(image().detach()), torch.rand(6, 2)).sum(),
    ],
)
def test_calls_made_by_torch_pass_the_checks(program: Callable[[], torch.Tensor]) -> None:
    with _Checking() as mode:
        program().sum().backward()
    assert mode.names or not torch.backends.mkldnn.is_available()


@pytest.mark.parametrize(
    ("op", "args", "name", "bounded"),
    [
        (
            "nll_loss_backward",
            [f(3), f(3, 3), torch.tensor([-1, -100, 10**9]), None, 0, -100, f()],
            2,
            [0, -100, 2],
        ),
        ("_embedding_bag_backward", [f(2, 8), n(4), torch.tensor([3, 99, 2]), *bags()], 2, [0, 4, 4]),
        ("linalg_ldl_solve", [f(3, 3), torch.tensor([-1, 2, 99], dtype=torch.int32), f(3, 1)], 1, [1, 2, 3]),
        ("linalg_ldl_solve", [f(3, 3), torch.tensor([-1, -1, 3], dtype=torch.int32), f(3, 1)], 1, [-1, -1, 3]),
        ("_ctc_loss", [f(9, 3, 6), n(12), torch.tensor([9, 9, 9]), torch.tensor([8, 99, -3])], 3, [4, 8, 0]),
        ("segment_reduce", [f(9), "sum", torch.tensor([1, 2, 0])], 2, [3, 4, 2]),
        ("linalg_eigvals", [torch.full((1, 1), torch.inf)], 0, [[torch.finfo().max]]),
    ],
)
def test_unchecked_indices_are_clamped(op: str, args: Any, name: int, bounded: list[Any]) -> None:
    bound_indices(getattr(ATEN, op).default, tuple(args), {})
    assert args[name].tolist() == bounded


def test_index_into_an_empty_tensor_is_refused() -> None:
    with pytest.raises(Unsupported, match="an index into a dimension of size 0"):
        bound_indices(ATEN.embedding_dense_backward.default, (f(2, 4), n(2), 0, -1, True), {})
    with pytest.raises(Unsupported, match="an index into a dimension of size 0"):
        bound_indices(ATEN._sparse_coo_tensor_with_dims_and_tensors.default, (1, 0, [0], n(1, 1), f(1)), {})


def test_inner_call_of_an_operator_is_checked() -> None:
    model = nn.LSTM(4, 6)
    weights = [weight.detach() for weight in model.parameters()]
    flags = (True, 1, 0.0, False, False, False)
    lstm = ATEN.lstm.input
    check_parts(lstm, (f(5, 2, 4), [f(1, 2, 6)] * 2, weights, *flags), {})
    with pytest.raises(Unsupported, match="weight1 has"):
        check_parts(lstm, (f(5, 2, 4), [f(1, 2, 6)] * 2, [weights[0], f(1, 6), *weights[2:]], *flags), {})


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(4, 6, bias=False),
        nn.LSTM(4, 6, num_layers=2, bidirectional=True, batch_first=True),
        nn.LSTM(4, 6, proj_size=3, num_layers=2),
        nn.GRU(4, 6, num_layers=2),
        nn.GRU(4, 6, bidirectional=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_weights_of_recurrent_layers_have_the_sizes_of_their_gates(layer: nn.RNNBase, is_packed: bool) -> None:
    checked: list[str] = []

    class Checking(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.__name__ in {"lstm", "gru"}:
                packet = getattr(ATEN, function.__name__)
                operator, place = (packet.data, 3) if is_packed else (packet.input, 2)
                check_agreement(operator, args, {})
                weights = args[place]
                for wrong in ([*weights[:-1], weights[-1][:1]], weights[:-1], []):
                    with pytest.raises(Unsupported, match="params"):
                        check_agreement(operator, (*args[:place], wrong, *args[place + 1 :]), {})
                checked.append(function.__name__)
            return function(*args, **(kwargs or {}))

    x = f(2, 2, 4)
    with Checking():
        layer(nn.utils.rnn.pack_padded_sequence(x, [2, 1], layer.batch_first) if is_packed else x)
    assert len(checked) == 1


def test_clamped_call_in_a_unit_is_checked() -> None:
    graph = torch.fx.Graph()
    grad = graph.placeholder("grad")
    args = (grad, graph.call_function(ATEN.ones.default, ([1, 1, 4, 4],)), graph.placeholder("indices"))
    graph.output(graph.call_function(bounding(ATEN.adaptive_max_pool2d_backward.default), args))
    module = torch.fx.GraphModule(nn.Module(), graph)
    check_graph(module, (f(1, 1, 2, 2), n(1, 1, 2, 2) + 99))
    with pytest.raises(Unsupported, match="grad_output has"):
        check_graph(module, (f(9, 1, 2, 2), n(9, 1, 2, 2)))


def test_unit_with_unexpected_inner_results_is_refused() -> None:
    graph = torch.fx.Graph()
    image = graph.placeholder("image")
    weight = graph.call_function(ATEN.ones.default, ([1],))
    graph.output(graph.call_function(ATEN.native_batch_norm.default, (image, weight, None, None, None, *BATCH_NORM)))
    with pytest.raises(Unsupported, match="weight has 1 instead of 64"):
        check_graph(torch.fx.GraphModule(nn.Module(), graph), (f(1, 64, 1, 1),))


def test_unit_does_not_use_a_sparse_tensor_whose_indices_another_call_may_have_changed() -> None:
    x = f(3, 3).fill_(1).to_sparse()
    changed, made = torch.fx.Graph(), torch.fx.Graph()
    taken = changed.placeholder("x")
    indices = changed.call_function(ATEN._indices.default, (taken,))
    changed.call_function(ATEN.fill_.Scalar, (indices, FAR))
    # its indices are uninitialized memory
    empty = made.call_function(ATEN.new_empty.default, (made.placeholder("x"), [3, 3]))
    for graph, operand in ((changed, taken), (made, empty)):
        graph.output(graph.call_function(ATEN.mm.default, (operand, operand)))
        with pytest.raises(Unsupported, match="sparse or nested tensor of another call"):
            check_graph(torch.fx.GraphModule(nn.Module(), graph), (x,))


def test_operators_of_this_torch_version_were_reviewed_for_unchecked_sizes() -> None:
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert min(REVIEWED) <= version <= max(REVIEWED), (
        "call the new and changed operators with sizes and indices that do not fit, each tensor up against "
        "memory that may not be touched; add those that do not check them to the tables, and the version to REVIEWED"
    )


FAR = 10**9
COO = {"dtype": torch.float32, "layout": torch.sparse_coo, "device": "cpu"}
BACKWARD = ATEN.max_pool2d_with_indices_backward.default


def far(*shape: int) -> torch.Tensor:
    return torch.full(shape, FAR)


def pooled(index: torch.Tensor) -> tuple[Any, ...]:
    return f(1, 1, 2, 2), f(1, 1, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False, index


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "index", "most"),
    [
        ("max_pool2d_with_indices_backward.default", pooled(far(1, 1, 2, 2)), {}, 7, 15),
        ("adaptive_max_pool2d_backward.default", (f(1, 1, 2, 2), f(1, 1, 4, 4), far(1, 1, 2, 2)), {}, 2, 15),
        ("_ctc_loss.default", (f(5, 1, 3), far(1, 2), [5], [2]), {}, 1, 2),
        # their own calls are only checked in the first run
        ("ctc_loss.IntList", (f(5, 1, 3), far(1, 2), [5], [2]), {}, 1, 2),
        ("sparse_coo_tensor.indices_size", (far(1, 1), f(1), [5]), COO, 0, 4),
        ("embedding_dense_backward.default", (f(2, 4), far(2), 10, -1, True), {}, 1, 9),
        ("embedding_sparse_backward.default", (f(1, 2), far(1), 5, -1, False), {}, 1, 4),
        ("_convert_indices_from_coo_to_csr.default", (far(3), 4), {}, 0, 3),
        ("_convert_indices_from_csr_to_coo.default", (far(3), torch.arange(4)), {}, 0, 4),
        ("segment_reduce.default", (f(5), "sum"), {"lengths": far(2), "unsafe": True}, "lengths", 5),
        ("_sparse_coo_tensor_with_dims_and_tensors.default", (1, 0, [5], far(1, 1), f(1)), COO, 3, 4),
        ("segment_reduce.default", (f(5), "sum"), {"offsets": far(2), "unsafe": True}, "offsets", 5),
        ("_embedding_bag_dense_backward.default", (f(1, 2), *[far(1)] * 4, 5, False, 0, None), {}, 1, 4),
    ],
)
def test_out_of_bounds_indices_are_clamped(
    op: str, args: tuple[Any, ...], kwargs: dict[str, Any], index: int | str, most: int
) -> None:
    packet, _, overload = op.partition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload)
    bound_indices(function, args, kwargs)
    tensor = args[index] if isinstance(index, int) else kwargs[index]
    assert 0 <= int(tensor.min()) <= int(tensor.max()) <= most
    function(*args, **kwargs)


def test_valid_indices_are_unchanged() -> None:
    index = torch.tensor([[[[0, 5], [15, 3]]]])
    bound_indices(BACKWARD, pooled(index), {})
    assert index.flatten().tolist() == [0, 5, 15, 3]
    lengths = torch.tensor([4, 0, 1])
    bound_indices(ATEN.segment_reduce.default, (f(5), "sum"), {"lengths": lengths, "unsafe": True})
    assert lengths.tolist() == [4, 0, 1]


def test_indices_that_share_memory_are_clamped() -> None:
    index = far(1).expand(1, 1, 2, 2)
    bound_indices(BACKWARD, pooled(index), {})
    assert index.unique().tolist() == [0]


def test_indices_read_by_other_calls_are_copied_before_clamping() -> None:
    padded = torch.tensor([[1, 2, -1, -1]])
    args, _ = bounded_arguments(ATEN._ctc_loss.default, (f(5, 1, 3), padded, [5], [2]), {})
    assert args[1].tolist() == [[1, 2, 0, 0]]
    assert padded.tolist() == [[1, 2, -1, -1]]
    within = torch.tensor([[1, 2, 0, 0]])
    args, _ = bounded_arguments(ATEN._ctc_loss.default, (f(5, 1, 3), within, [5], [2]), {})
    assert args[1] is within
    with pytest.raises(Unsupported, match="clamped to valid values"):
        bounded_arguments(ATEN._ctc_loss.default, (f(5, 1, 0), padded, [5], [2]), {})


def float_spec(*shape: int, **others: Any) -> TensorSpec:
    return spec(torch.float32, *shape, **others)


def spec(dtype: torch.dtype, *shape: int, **others: Any) -> TensorSpec:
    stride = tuple(torch.empty(shape, device="meta").stride())
    return TensorSpec(shape, stride, dtype, "cpu", **others)


def trace_of(path: Path, calls: list[tuple[str, tuple[Any, ...], Any, list[int]]], *values: Values) -> Path:
    """Write a trace of calls in one module, from operator, arguments, outputs and the storages of both."""
    signatures: list[Record] = [
        Signature(number, OPERATOR, op, args, {}, outputs) for number, (op, args, outputs, _) in enumerate(calls)
    ]
    numbers = list(range(len(calls)))
    storages = [storage for *_, own in calls for storage in own]
    block = Calls(
        *(0, numbers, [0] * len(calls), [10 * number for number in numbers], [5] * len(calls)),
        *([len(own) for *_, own in calls], storages),
    )
    records = [
        *values,
        Scope(0, "net", "Net", "forward"),
        *signatures,
        block,
        End(len(calls), len(calls), 10 * len(calls)),
    ]
    return write(path, records)


POOLED = (float_spec(1, 1, 2, 2), float_spec(1, 1, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False)
INDEX = spec(torch.int64, 1, 1, 2, 2)


@pytest.mark.parametrize("way", [[], ["--unit", "module"], ["--sequence"]])
def test_out_of_bounds_indices_of_a_trace_end_no_process(tmp_path: Path, way: list[str]) -> None:
    path = trace_of(
        tmp_path / "t.jsonl",
        [
            ("aten.fill_.Scalar", (INDEX, FAR * 8), INDEX, [3, 3]),
            ("aten.max_pool2d_with_indices_backward.default", (*POOLED, INDEX), float_spec(1, 1, 4, 4), [1, 2, 3, 4]),
        ],
    )
    done = succeed("opreplay", path, "--iterations", "2", *way, cwd=tmp_path)
    assert "ended its process" not in done.stdout + done.stderr


def test_out_of_bounds_values_of_a_case_are_clamped(tmp_path: Path) -> None:
    index = spec(torch.int64, 1, 1, 2, 2, values=0)
    signature = Signature(0, OPERATOR, str(BACKWARD), (*POOLED, index), {}, float_spec(1, 1, 4, 4))
    block = Calls(0, [0], [0], [0], [5])
    path = write(
        tmp_path / "t.jsonl",
        [Values(0, Constant(FAR * 8)), Scope(0, "", "", "forward"), signature, block, End(1, 1, 10)],
    )
    output = tmp_path / "r.json"
    succeed("opreplay", path, "--iterations", "2", "-o", output, cwd=tmp_path)
    assert Results.load(output).frame["status"].tolist() == ["ok"]


X, ROWS, HALVES, PAIRS = float_spec(4, values=0), spec(torch.int64, 4, 1), float_spec(4, 1), float_spec(6)
ONE = float_spec(1)


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        pytest.param(
            [
                ("aten.nonzero.default", (X,), ROWS, [0, 1]),
                ("aten.mul.Tensor", (ROWS, 0.5), HALVES, [1, 2]),
                ("aten._pdist_backward.default", (PAIRS, HALVES, 2.0, PAIRS), HALVES, [3, 2, 4, 5]),
                ("aten.fill_.Scalar", (X, 0.0), X, [0, 0]),
            ],
            r"grad has \(6,\) instead of \(0,\)",
            id="result of another size",
        ),
        pytest.param(
            [
                ("aten._pdist_backward.default", (PAIRS, HALVES, 2.0, PAIRS), HALVES, [0, 1, 2, 3]),
                ("aten.set_.source_Tensor", (PAIRS, ONE), ONE, [2, 4, 4]),
            ],
            "it changes the sizes of its arguments",
            id="argument of another size",
        ),
    ],
)
def test_later_runs_of_a_unit_do_not_read_beyond_tensors_whose_sizes_changed(
    tmp_path: Path, calls: list[Any], reason: str
) -> None:
    path, output = trace_of(tmp_path / "t.jsonl", calls, Values(0, Constant(1.0))), tmp_path / "r.json"
    run_command("opreplay", path, "--unit", "module", "--iterations", "2", "-o", output, cwd=tmp_path)
    (row,) = Results.load(output)
    assert row.status == "unsupported"
    assert re.search(reason, str(row.error))


def test_view_beyond_its_memory_is_refused_in_a_unit(tmp_path: Path) -> None:
    source, beyond = float_spec(4), float_spec(4, offset=1000)
    path = trace_of(
        tmp_path / "t.jsonl",
        [
            ("inductor._reinterpret_tensor.default", (source, [4], [1], 1000), beyond, [1, 1]),
            ("aten.fill_.Scalar", (beyond, 1.5), beyond, [1, 1]),
        ],
    )
    output = tmp_path / "r.json"
    done = run_command("opreplay", path, "--unit", "module", "--iterations", "2", "-o", output, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    (row,) = Results.load(output).frame.to_dict("records")
    assert row["status"] == "unsupported"
    assert "is for torch's own compilers" in row["error"]
