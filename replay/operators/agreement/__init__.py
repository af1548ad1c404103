"""Checks that keep replayed calls from accessing memory outside their tensors.

Traces may be untrusted, and some operators of torch check neither indices nor sizes that must match. The module
`indices` clamps indices to valid values; `CHECKS` contains the checks of sizes, and a call that fails one is not run.
The operators were found by calling all operators of the torch versions in `REVIEWED` with invalid arguments. A new
version of torch requires another review, of new operators and of new kernels of existing operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.replay.operators.admission import Unsupported
from opgrip.replay.operators.agreement import gradients, layers
from opgrip.replay.operators.agreement.indices import bounded_function, check_indices
from opgrip.replay.operators.agreement.layers import Check, both, own_memory
from opgrip.replay.operators.torch_private import is_composite

_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm")
_UPSAMPLES = (
    *(f"upsample_{kind}" for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
    *(f"{name}{n}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)),
    *(f"_upsample_{kind}2d_aa" for kind in ("bilinear", "bicubic", "lanczos")),
)
_OPTIMIZERS = ("adam", "adamw", "sgd", "adagrad")
_ATTENTIONS = ("flash", "efficient", "cudnn", "fused")

_OF_RNN = ("input", "hx_", "cx_", "cx_tmp", "output", "hy_", "cy_", "workspace")
_OF_BAG = ("weight", "indices", "offsets", "per_sample_weights", "compressed_indices_mapping")
_STRIDED = (
    *("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"),
    *("empty_strided", "new_empty_strided"),
)
_BITS = ("byte", "4bit", "2bit")

_SIZES: Mapping[str, Check] = {
    **{f"aten::_fused_{name}{ending}": gradients.optimizer for name in _OPTIMIZERS for ending in ("", "_")},
    **{f"aten::{name}{ending}": layers.upsample for name in _UPSAMPLES for ending in ("", "_backward")},
    **{f"aten::{name}{ending}": layers.batch_norm for name in _NORMS for ending in ("", "_backward")},
    **{f"aten::_native_batch_norm_legit{ending}": layers.batch_norm for ending in ("", "_functional", "_no_training")},
    **{
        f"aten::_batch_norm_{name}": layers.batch_norm
        for name in ("no_update", "with_update", "with_update_functional")
    },
    "aten::batch_norm_update_stats": layers.batch_norm,
    "aten::batch_norm_elemt": layers.batch_norm,
    **{f"quantized::batch_norm{n}": layers.quantized_batch_norm for n in ("", "1d", "2d", "3d")},
    **{f"quantized::batch_norm{n}_relu": layers.quantized_batch_norm for n in ("", "1d", "2d", "3d")},
    **{f"aten::native_layer_norm{ending}": layers.layer_norm for ending in ("", "_backward")},
    **{f"aten::_fused_rms_norm{ending}": layers.layer_norm for ending in ("", "_backward")},
    "aten::native_group_norm": layers.group_norm,
    "aten::native_group_norm_backward": layers.group_norm_backward,
    **{f"aten::_weight_norm_{ending}": layers.weight_norm for ending in ("interface", "interface_backward")},
    **{
        f"aten::_scaled_dot_product_{name}_attention{ending}": layers.attention
        for name in _ATTENTIONS
        for ending in ("", "_backward", "_overrideable", "_overrideable_backward")
    },
    **{
        f"aten::_scaled_dot_product_flash_attention_for_cpu{ending}": layers.attention_for_cpu
        for ending in ("", "_backward")
    },
    "aten::_native_multi_head_attention": layers.encoder,
    "aten::_transformer_encoder_layer_fwd": layers.encoder,
    "aten::_transform_bias_rescale_qkv": layers.projected,
    **{f"aten::mkldnn_rnn_layer{ending}": layers.rnn for ending in ("", "_backward")},
    **{name: gradients.as_forward(forward) for name, forward in gradients.FORWARDS.items()},
    **{f"aten::_adaptive_avg_pool{n}d_backward": gradients.pooled_planes(n) for n in (2, 3)},
    "aten::adaptive_avg_pool3d_backward": gradients.pooled_planes(3),
    **{f"aten::adaptive_max_pool{n}d_backward": gradients.pooled_planes(n) for n in (2, 3)},
    **{f"aten::fractional_max_pool{n}d_backward": gradients.pooled_planes(n) for n in (2, 3)},
    **{f"aten::_{name}softmax_backward_data": gradients.of_output("output") for name in ("", "log_")},
    **{f"aten::_adaptive_avg_pool{n}d": gradients.pooled_to(n) for n in (2, 3)},
    "aten::nll_loss_backward": layers.classes,
    "aten::nll_loss2d_backward": layers.classes,
    "aten::_embedding_bag": gradients.bag,
    "aten::_embedding_bag_forward_only": gradients.bag,
    "aten::_segment_reduce_backward": gradients.segments,
    "aten::_ctc_loss": gradients.ctc,
    "aten::_ctc_loss_backward": gradients.ctc,
    "aten::multi_margin_loss_backward": layers.margins,
    "aten::grid_sampler_2d_backward": gradients.grid,
    "aten::_grid_sampler_2d_cpu_fallback_backward": gradients.grid,
    "aten::grid_sampler_3d_backward": gradients.grid,
    "aten::_pdist_backward": gradients.pairwise,
    "aten::_cdist_backward": gradients.distances,
    "aten::_embedding_bag_backward": gradients.bag_gradient,
    "aten::_embedding_bag_dense_backward": gradients.bag_gradient,
    "aten::_embedding_bag_sparse_backward": gradients.bag_gradient,
    "aten::_embedding_bag_per_sample_weights_backward": gradients.bag_gradient,
    **{f"quantized::embedding_bag_{bits}_rowwise_offsets": gradients.bag_of_rows for bits in _BITS},
    "aten::_weight_int4pack_mm_for_cpu": gradients.matmul_int4,
    "aten::_dyn_quant_matmul_4bit": gradients.matmul_4bit,
    "aten::_fused_moving_avg_obs_fq_helper": gradients.observed,
    "aten::_fused_moving_avg_obs_fq_helper_functional": gradients.observed,
    "aten::linalg_ldl_solve": layers.solutions,
    "aten::lu_unpack": layers.pivots,
    "aten::_spdiags": layers.diagonals,
    **{f"aten::{name}": layers.reach for name in _STRIDED},
    "aten::choose_qparams_optimized": gradients.numbered,
    "aten::_convert_indices_from_coo_to_csr": layers.compressed_rows,
    "aten::_sparse_mm_reduce_impl_backward": layers.reduced_products,
    "aten::_fft_r2c": layers.dimensions,
    "aten::_fft_c2c": layers.dimensions,
    "aten::_fft_c2r": layers.half_spectrum,
    "aten::_nested_from_padded": layers.padded_rows,
    **{f"aten::rrelu_with_noise{ending}": layers.noise for ending in ("", "_", "_functional", "_backward")},
}

_STATES = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_sums", "momentum_buffer_list")
# arguments whose elements the kernels read as contiguous memory, whatever their strides are
_IN_A_ROW: Mapping[str, tuple[str, ...]] = {
    **{f"aten::_fused_{name}{ending}": ("self", "grads", *_STATES) for name in _OPTIMIZERS for ending in ("", "_")},
    "aten::native_group_norm": ("weight", "bias"),
    "aten::native_layer_norm_backward": ("mean", "rstd"),
    "aten::_fused_rms_norm_backward": ("rstd",),
    **{
        f"aten::_weight_norm_interface{ending}": ("grad_w", "v", "g", "saved_v", "saved_g", "saved_norms")
        for ending in ("", "_backward")
    },
    **{
        f"quantized::batch_norm{n}{ending}": ("weight", "bias", "mean", "var")
        for n in ("", "1d", "2d", "3d")
        for ending in ("", "_relu")
    },
    **{f"aten::mkldnn_rnn_layer{ending}": _OF_RNN for ending in ("", "_backward")},
    "aten::_ctc_loss": ("targets",),
    "aten::_ctc_loss_backward": ("targets",),
    "aten::_embedding_bag": ("indices", "offsets"),
    "aten::_embedding_bag_forward_only": ("indices", "offsets"),
    **{
        f"aten::_embedding_bag{kind}_backward": ("indices", "offsets", "offset2bag", "bag_size")
        for kind in ("", "_dense", "_sparse")
    },
    "aten::_embedding_bag_per_sample_weights_backward": ("indices", "offsets", "offset2bag"),
    **{f"quantized::embedding_bag_{bits}_rowwise_offsets": _OF_BAG for bits in _BITS},
    **{f"quantized::embedding_bag_{bits}_unpack": ("weight",) for bits in _BITS},
    "aten::_weight_int4pack_mm_for_cpu": ("self", "mat2", "qScaleAndZeros"),
    "aten::_weight_int8pack_mm": ("self", "mat2", "scales"),
    "aten::_dyn_quant_matmul_4bit": ("inp", "packed_weights"),
    "aten::_fused_moving_avg_obs_fq_helper": ("running_min", "running_max", "scale", "zero_point"),
    "aten::_convert_indices_from_coo_to_csr": ("self",),
    "aten::choose_qparams_optimized": ("input",),
    **{f"quantization::_{name}": ("input",) for name in ("FloatToBfloat16Quantized", "Bfloat16QuantizedToFloat")},
    "aten::_nested_compute_contiguous_strides_offsets": ("nested_size",),
    "aten::_nested_from_padded": ("cpu_nested_shape_example",),
    **{f"aten::{kind}_max_pool{n}d_backward": ("indices",) for kind in ("adaptive", "fractional") for n in (2, 3)},
    **{f"aten::max_pool{n}d_with_indices_backward": ("indices",) for n in (2, 3)},
    **{f"aten::{name}": ("self",) for name in ("median", "nanmedian")},
    **{f"aten::rrelu_with_noise{ending}": ("noise",) for ending in ("", "_", "_functional", "_backward")},
}


def _tables() -> Mapping[str, Check]:
    rows = {name: own_memory(*names) for name, names in _IN_A_ROW.items()}
    return {**_SIZES, **{name: both(_SIZES[name], row) if name in _SIZES else row for name, row in rows.items()}}


CHECKS = _tables()  # all checks by operator


def check_agreement(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise `Unsupported` if sizes of a call's arguments do not match each other, for operators that do not check this
    themselves.
    """
    schema = getattr(function, "_schema", None)
    if schema is None:
        return
    outputs = [argument.name for argument in schema.arguments if argument.is_out]
    checks = [CHECKS[schema.name]] if schema.name in CHECKS else []
    if not outputs and not checks:
        return
    names = (argument.name for argument in schema.arguments)
    defaults = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    call = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    try:
        for name, actual, expected in both(*checks, own_memory(*outputs))(call):
            if actual != expected:
                raise Unsupported(f"its sizes do not match: {name} has {actual} instead of {expected}")
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise Unsupported(f"its sizes cannot be compared ({error})") from error


class _CheckedCalls(TorchDispatchMode):
    """A dispatch mode that checks sizes and indices of each operator call that runs inside it."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        check_agreement(function, args, kwargs)
        check_indices(function, args, kwargs)
        return function(*args, **kwargs)


def checking_parts(function: Any) -> AbstractContextManager[Any]:
    """Return a context in which the calls that a composite operator makes are checked; for other operators it does
    nothing.
    """
    return _CheckedCalls() if is_composite(function) else nullcontext()


def check_parts(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Run a composite operator once, and raise `Unsupported` if a call that it makes has invalid sizes or indices.

    Other errors are ignored here, because they occur again when the operator is measured.
    """
    with torch.no_grad(), checking_parts(function):
        try:
            function(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return


def is_checked(graph: fx.Graph) -> bool:
    """Return True if a graph calls an operator whose sizes have to be checked, or a composite operator."""
    functions = (bounded_function(node.target) for node in graph.nodes if node.op == "call_function")
    return any(
        getattr(getattr(function, "_schema", None), "name", None) in CHECKS or is_composite(function)
        for function in functions
    )


def check_graph(module: fx.GraphModule, args: tuple[Any, ...]) -> None:
    """Run a subgraph once with its calls checked, if any of them needs a check; raise `Unsupported` for invalid sizes
    or indices.

    Sizes inside the subgraph may differ from the recorded ones, so checking the recorded arguments is not enough.
    """
    if is_checked(module.graph):
        with torch.no_grad(), _CheckedCalls():
            fx.Interpreter(module).run(*args)


REVIEWED = ((2, 6), (2, 13), (2, 15))  # versions of torch that were reviewed; versions in between count as reviewed too
