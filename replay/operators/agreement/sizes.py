"""Rules for sizes that must match in calls of operators that do not check this themselves."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite, prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from opgrip.replay.operators.admission import MMCV
from opgrip.traces.schema.arguments import TensorSpec

Call: TypeAlias = Mapping[str, Any]  # arguments of a call by name: tensors, or their specs
Sizes: TypeAlias = tuple[str, object, object]  # name of a property, its actual value, and its expected value

# Operators (of aten, with alternatives in braces), and rules for their arguments:
#   a b: n c *rest   shape of the tensors a and b; a new name stands for a size, *name for several, _ for any size
#   a b: # n m       number of elements, n or m
#   a b: last n m    last size
#   a b: dtype n m   dtype
#   a b: adjacent    elements along the last dimension are adjacent in memory
#   a b: memory      each element has its own memory (no stride of 0), because the kernel reads it as contiguous
#   a b: forward     shapes of the results of the forward operator
#   a b: like c      lists of tensors with the shapes of the tensors in list c
#   n = x            a name for other rules
#   x                a condition
# `when x` restricts a rule. Rules for tensors that a call lacks do not apply; other arguments that it lacks are None.
_RULES = """
_fused_{adam,adamw,sgd,adagrad}{,_}
    grads exp_avgs exp_avg_sqs state_sums: like self; len(state_steps) == len(self) when state_steps is not None
    max_exp_avg_sqs: like self when amsgrad or max_exp_avg_sqs
    momentum_buffer_list: like self when momentum or momentum_buffer_list
    state_steps lr grad_scale found_inf: # 1
    self grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_sums momentum_buffer_list: memory
upsample_{linear1d,bilinear2d,bicubic2d,trilinear3d}{,_backward} upsample_nearest{1,2,3}d{,_backward}
_upsample_nearest_exact{1,2,3}d{,_backward} _upsample_{bilinear,bicubic,lanczos}2d_aa{,_backward}
    # overloads with `input` compute the output size or the scales from each other
    known = input is None and output_size is not None
    sizes = shape_of(self) if input_size is None else input_size when known
    len(sizes) == len(output_size) + 2 when known; grad_output: *sizes[:2] *output_size when known
    is_scale(scales_d, sizes[-3], output_size[-3]) when known and scales_d is not None
    is_scale(scales_h, sizes[-2], output_size[-2]) when known and scales_h is not None
    is_scale(scales_w, sizes[-1], output_size[-1]) when known and scales_w is not None
    is_scale(scales, sizes[-1], output_size[-1]) when known and scales is not None
{,native_,cudnn_,miopen_}batch_norm{,_backward} _native_batch_norm_legit{,_functional,_no_training}
_batch_norm_{no_update,with_update,with_update_functional} batch_norm_update_stats batch_norm_elemt
    input: _ channels *_; weight bias running_mean running_var mean invstd: # channels
    grad_out grad_output: *input.shape; trains = False not in (train, training, update)
    # an evaluation saves no statistics
    save_mean save_invstd save_var: # channels when trains; save_mean save_invstd save_var: # 0 channels
native_batch_norm _native_batch_norm_legit {,native_}batch_norm_backward
    # an evaluation reads them
    trains or running_mean is not None and running_var is not None
{,native_}batch_norm_backward
    not trains or save_mean is not None and (save_invstd is not None or save_var is not None)
convolution_backward
    input grad_output: batch *_
    max(*output_padding, 0) < max(*stride, *dilation) when transposed
quantized::batch_norm{,1d,2d,3d}{,_relu}
    qx: _ channels *_; weight bias mean var: # channels; weight bias mean var: memory
native_layer_norm{,_backward} _fused_rms_norm{,_backward}
    input: *before *normalized_shape; weight bias: *normalized_shape
    grad_out: *input.shape; mean rstd: # prod(before)
native_layer_norm_backward _fused_rms_norm_backward
    mean rstd: memory
native_group_norm{,_backward}
    N * C * HxW == elements(input); group > 0 and C % group == 0
    grad_out: *input.shape; weight bias: # C; mean rstd: # N*group
native_group_norm
    weight bias: memory
native_group_norm_backward
    # since torch 2.15 it accepts gradients with any strides, and autograd calls it with them
    grad_out input weight mean rstd: memory when torch_version < (2, 15)
_weight_norm_interface{,_backward}
    v saved_v grad_w: *sizes; g saved_g saved_norms: # sizes[dim]
    grad_w v g saved_v saved_g saved_norms: memory
_scaled_dot_product_{flash,efficient,cudnn,fused}_attention{,_backward,_overrideable,_overrideable_backward}
_scaled_dot_product_flash_attention_for_cpu{,_backward}
    query: batch heads length width; key: batch key_heads keys width
    value: batch key_heads keys value_width; grad_out grad_out_ out: batch heads length value_width
    # several heads of a query may share one head of a key
    heads == 0 or key_heads > 0 and heads % key_heads == 0
_scaled_dot_product_flash_attention_for_cpu{,_backward}
    # the kernel steps from head to head without checking bounds
    value: *key.shape; logsumexp: batch heads length; query key value out: adjacent
_native_multi_head_attention _transformer_encoder_layer_fwd
    heads = num_heads or num_head or 0; heads > 0 and embed_dim % heads == 0; src query key value: last embed_dim
    qkv_weight: 3*embed_dim embed_dim; qkv_bias: 3*embed_dim; proj_weight: embed_dim embed_dim
    proj_bias norm_weight_1 norm_weight_2 norm_bias_1 norm_bias_2 ffn_bias_2: embed_dim
    kind = (query if src is None else src).dtype; key value qkv_weight qkv_bias proj_weight proj_bias: dtype kind
    norm_weight_1 norm_weight_2 norm_bias_1 norm_bias_2: dtype kind
    ffn_weight_1 ffn_weight_2 ffn_bias_1 ffn_bias_2: dtype kind
_transform_bias_rescale_qkv
    qkv_bias: last_size(qkv); qkv_bias: dtype qkv.dtype; num_heads > 0 and last_size(qkv) % (3 * num_heads) == 0
mkldnn_rnn_layer
    weight0: 4*hidden_size features; weight1: 4*hidden_size hidden_size
    weight2 weight3: 4*hidden_size when has_biases
mkldnn_rnn_layer_backward
    weight1: 4*hidden_size features; weight2: 4*hidden_size hidden_size
    weight3 weight4: 4*hidden_size when has_biases
mkldnn_rnn_layer{,_backward}
    # mode 2 is LSTM
    mode == 2; input: steps batch features; output grad_output: steps batch hidden_size
    hx_ cx_ cx_tmp hy_ cy_ grad_hy grad_cy: # batch*hidden_size
    weight0 weight1 weight2 weight3 weight4 hx_ cx_ cx_tmp output hy_ cy_: dtype input.dtype
    grad_output grad_hy grad_cy: dtype input.dtype; input hx_ cx_ cx_tmp output hy_ cy_ workspace: memory
mkldnn_rnn_layer_backward
    # last, because it runs the forward with these sizes
    workspace: dtype uint8; workspace: *lstm_workspace(call)
avg_pool{2,3}d_backward {reflection,replication}_pad{1,2,3}d_backward
    grad_output: forward
max_pool{2,3}d_with_indices_backward
    grad_output indices: forward; indices: memory
unfold_backward
    grad_in: forward
_adaptive_avg_pool2d_backward {adaptive,fractional}_max_pool2d_backward
    self: *planes _ _; grad_output: *planes _ _
{,_}adaptive_avg_pool3d_backward {adaptive,fractional}_max_pool3d_backward
    self: *planes _ _ _; grad_output: *planes _ _ _
_adaptive_avg_pool{2,3}d_backward adaptive_avg_pool3d_backward {adaptive,fractional}_max_pool{2,3}d_backward
    grad_output: *planes *output_size when output_size is not None; indices: *grad_output.shape
    elements(self) > 0 or elements(grad_output) == 0; indices: memory
_adaptive_avg_pool2d
    len(output_size) == 2
_adaptive_avg_pool3d
    len(output_size) == 3
_{,log_}softmax_backward_data
    grad_output: *output.shape
nll_loss{,2d}_backward
    shape_of(self)[1 if len(shape_of(self)) > 1 else 0] > 0 or elements(target) == 0
multi_margin_loss_backward
    samples = shape_of(self)[0] if len(shape_of(self)) > 1 else 1; target: # samples; weight: *self.shape[-1:]
    losses = samples if reduction == 0 else 1; grad_output: # losses
rrelu_with_noise{,_,_functional,_backward}
    noise grad_output: *self.shape; noise: dtype self.dtype; noise: memory
_segment_reduce_backward
    ends = shape_of(offsets if lengths is None else lengths); count = ends[-1] - (lengths is None)
    axis == len(ends) - 1; ends[:-1] == shape_of(data)[:axis]
    grad output: *data.shape[:axis] count *data.shape[axis+1:]
_ctc_loss{,_backward}
    log_probs: time batch classes; 0 <= blank < classes; input_lengths target_lengths: batch
    are_lengths(input_lengths, batch, time); are_lengths(target_lengths, batch, shape_of(targets)[-1])
    targets: batch _ when len(shape_of(targets)) > 1; targets: memory
    sum(target_lengths) <= elements(targets) when len(shape_of(targets)) < 2 and not is_tensor(target_lengths)
    grad neg_log_likelihood: # batch; log_alpha: batch time states; states % 2 == 1 when log_alpha is not None
    are_lengths(target_lengths, batch, states // 2) when log_alpha is not None
_embedding_bag{,_forward_only}
    elements(offsets) > 0 or elements(indices) == 0; indices offsets: memory
_embedding_bag{,_dense,_sparse,_per_sample_weights}_backward
    grad: rows columns; weight: _ columns; indices offsets offset2bag: dtype int32 int64; bag_size: # rows
    (shape_of(weight)[0] if num_weights is None else num_weights) > 0 or elements(indices) == 0
    per_sample_weights: *indices.shape; offset2bag: *indices.shape when elements(offset2bag)
    0 <= elements(offsets) - rows <= 1 when is_tensor(offsets); maximum_indices: rows columns when mode == 2
    indices offsets offset2bag bag_size: memory
quantized::embedding_bag_{byte,4bit,2bit}_rowwise_offsets
    per_sample_weights: *indices.shape
    weight indices offsets per_sample_weights compressed_indices_mapping: memory
quantized::embedding_bag_{byte,4bit,2bit}_unpack
    weight: memory
grid_sampler_{2,3}d_backward _grid_sampler_2d_cpu_fallback_backward
    grad_output: *input.shape[:2] *grid.shape[1:-1]
_pdist_backward
    self: rows *_; grad grad_output pdist: rows*(rows-1)//2; rows > 0
_cdist_backward
    x1: *batch1 rows1 columns; x2: *batch2 rows2 columns; cdist grad: *broadcast(batch1,batch2) rows1 rows2
_weight_int4pack_mm_for_cpu
    # the scales of the 4-bit matrix apply to groups along the summed dimension
    inner = shape_of(self)[-1]; columns = shape_of(mat2)[0]; qGroupSize > 0 and inner % qGroupSize == 0
    mat2: # columns*inner//2; qScaleAndZeros: inner//qGroupSize columns 2; self mat2 qScaleAndZeros: memory
_weight_int8pack_mm
    self mat2 scales: memory
_dyn_quant_matmul_4bit
    # the packed 4-bit matrix contains its scales and a bias
    inp: _ in_features; min(block_size, in_features, out_features) > 0; in_features % block_size == 0
    scales = 0 if packed_weights.dtype == uint8 else out_features * (in_features // block_size)
    elements(packed_weights) >= out_features * in_features // 2 + scales; inp packed_weights: memory
_fused_moving_avg_obs_fq_helper{,_functional}
    # one scale per channel, or one in all; minimum and maximum may be empty
    count = shape_of(self)[ch_axis] if per_row_fake_quant else 1; scale zero_point: # count
    running_min running_max: # 0 count; observer_on fake_quant_on: # 1
_fused_moving_avg_obs_fq_helper
    running_min running_max scale zero_point: memory
choose_qparams_optimized
    0 <= numel <= elements(input); input: memory
quantization::_{FloatToBfloat16Quantized,Bfloat16QuantizedToFloat}
    input: memory
linalg_ldl_solve
    LD: *batch rows _; pivots: *batch rows; broadcast(batch, shape_of(B)[:-2]) == batch
lu_unpack
    LU_data: *batch rows columns; LU_pivots: *batch min(rows,columns)
_spdiags
    len(shape) == 0 or min(shape) >= 0
as_strided{,_,_copy,_scatter} {,new_}empty_strided
    # torch computes the end of a view in 64 bits
    -(2**59) < last_place(size, stride, storage_offset) < 2**59
_convert_indices_from_coo_to_csr
    size > 0 or size == elements(self) == 0; self: memory
_sparse_mm_reduce_impl_backward
    # only the named reductions save indices
    self: rows inner; weight: inner columns; grad_out: rows columns
    arg_out: rows columns when reduce in ('amax', 'amin')
_fft_{r2c,c2c,c2r}
    are_dimensions(dim, len(shape_of(self)))
_fft_c2r
    last_dim_size > 0; shape_of(self)[dim[-1]] == last_dim_size // 2 + 1 when dim
_nested_from_padded
    cpu_nested_shape_example: padded.shape[0] len(padded.shape)-1; cpu_nested_shape_example: memory
_nested_compute_contiguous_strides_offsets
    nested_size: memory
{,nan}median
    self: memory
{lstm,gru,rnn_tanh,rnn_relu}
    elements(batch_sizes) > 0 when is_tensor(batch_sizes); batch_sizes: memory
{lstm,gru}
    # they divide the rows of a weight among the gates, and do not check the number of rows
    0 < num_layers <= len(params); params: like recurrent_weights(call)
    batch = shape_of(input)[not batch_first] when input is not None; hx: num_layers*(1+bidirectional) batch _
mmcv::nms
    boxes: count 4; scores: count
mmcv::roi_align_{forward,backward}
    input grad_input: _ channels height width; output grad_output: boxes channels aligned_height aligned_width
    argmax_y argmax_x: boxes channels aligned_height aligned_width when pool_mode == 0
    maps = input if grad_input is None else grad_input; regions = output if grad_output is None else grad_output
    max(elements(maps), elements(regions)) < 2**31
    input rois output argmax_y argmax_x grad_input: memory
    pooled_height = aligned_height; pooled_width = aligned_width
    min(channels, height, width, pooled_height, pooled_width) > 0
mmcv::psamask_{forward,backward}
    positions = h_feature * w_feature; min(num_, h_feature, w_feature, h_mask, w_mask) > 0
    input grad_input: # num_*h_mask*w_mask*positions; output grad_output: # num_*positions**2
    input output grad_input grad_output: memory
mmcv::deform_conv_{forward,backward_input,backward_parameters} mmcv::modulated_deform_conv_{forward,backward}
    weight gradWeight: filters own high wide; input: images channels _ _; channels == own * group
    offset: images 2*deformable_group*high*wide height width; mask: images deformable_group*high*wide height width
    output gradOutput grad_output: images filters height width
    gradInput grad_input: *input.shape; gradOffset grad_offset: *offset.shape; grad_mask: *mask.shape
    strides = (dH or stride_h, dW or stride_w); dilations = (dilationH or dilation_h, dilationW or dilation_w)
    pads = (padH or pad_h or 0, padW or pad_w or 0); kernel = (kH or kernel_h, kW or kernel_w)
    kernel == (high, wide); min(group, deformable_group, im2col_step or 1, *kernel, *strides, *dilations) > 0
    max(*kernel, *strides, *dilations, *pads, -min(pads)) < 2**15; channels % deformable_group == 0
    height == (input.shape[2] + 2*pads[0] - dilations[0] * (high - 1) - 1) // strides[0] + 1 > 0
    width == (input.shape[3] + 2*pads[1] - dilations[1] * (wide - 1) - 1) // strides[1] + 1 > 0
    max(elements(input), images * channels * high * wide * height * width) < 2**31
    input offset mask gradInput grad_input gradOffset grad_offset grad_mask: memory
torchvision::{,_}{roi_align,roi_pool,ps_roi_align,ps_roi_pool}{,_backward} mmcv::roi_align_{forward,backward}
    # coordinates that overflow become indices
    rois: boxes 5; abs(spatial_scale) <= (1 if rois.dtype == float16 else 1e9)
    # the size of a table is their product, in 32 bits
    max(pooled_height, pooled_width) <= 2**14; (sampling_ratio or 0)**2 * pooled_height * pooled_width < 2**31
torchvision::_{roi_align,roi_pool,ps_roi_align,ps_roi_pool}_backward
    min(batch_size, channels, height, width, pooled_height, pooled_width) > 0
    rois argmax channel_mapping: memory; argmax channel_mapping: *grad.shape
torchvision::_{roi_align,roi_pool}_backward
    grad: boxes channels pooled_height pooled_width
torchvision::_{ps_roi_align,ps_roi_pool}_backward
    grad: boxes channels//(pooled_height*pooled_width) pooled_height pooled_width
torchvision::_deform_conv2d_backward
    weight: filters own rows columns; input: batch own*groups _ _; grad: batch filters height width; bias: filters
    offset: batch 2*offset_groups*rows*columns height width
    mask: batch offset_groups*rows*columns height width when use_mask
    min(stride_h, stride_w, dilation_h, dilation_w, groups, offset_groups, rows, columns) > 0
"""


def expanded(names: str) -> list[str]:
    operators = []
    for name in names.split():
        parts = re.split(r"\{(.*?)\}", name if "::" in name else f"aten::{name}")
        choices = (part.split(",") if position % 2 else [part] for position, part in enumerate(parts))
        operators += ["".join(choice) for choice in itertools.product(*choices)]
    return operators


def _rules_by_operator() -> Mapping[str, tuple[str, ...]]:
    table: dict[str, tuple[str, ...]] = {}
    operators: list[str] = []
    in_rules = True
    for line in _RULES.strip().splitlines():
        if line.startswith("    "):
            rules = () if line.startswith("    #") else tuple(line.strip().split("; "))
            table.update({operator: (*table.get(operator, ()), *rules) for operator in operators})
        else:
            operators = expanded(line) + ([] if in_rules else operators)
        in_rules = line.startswith("    ")
    return table


CHECKS = _rules_by_operator()  # rules by operator


def named(function: Any) -> tuple[str, tuple[str, ...]]:
    """Return the name of an operator or of a function of mmcv's extension, and the names of its arguments."""
    schema = getattr(function, "_schema", None)
    if schema is not None:
        return schema.name, tuple(argument.name for argument in schema.arguments)
    if getattr(function, "__module__", None) != MMCV:
        return "", ()
    # its docstring begins like `nms(boxes: torch.Tensor, iou_threshold: float`
    return f"mmcv::{function.__name__}", tuple(re.findall(r"(\w+): ", (function.__doc__ or "").partition(")")[0]))


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor | TensorSpec)


def _has_strides(tensor: Any) -> bool:
    if isinstance(tensor, TensorSpec):
        return tensor.stride is not None
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_mkldnn


def _strides(tensor: Any) -> tuple[int, ...]:
    return tuple((tensor.stride or ()) if isinstance(tensor, TensorSpec) else tensor.stride())


def _last_place(size: Iterable[int], stride: Iterable[int], offset: int | None) -> int:
    return (offset or 0) + sum((n - 1) * step for n, step in zip(size, stride, strict=True) if n > 0)


def _lstm_workspace(call: Call) -> tuple[int, ...]:
    forward = torch.ops.aten.mkldnn_rnn_layer.default
    renamed = {**{f"weight{n}": f"weight{n + 1}" for n in range(4)}, "cx_": "cx_tmp"}
    values = {**call, "train": True}
    arguments = (values[renamed.get(argument.name, argument.name)] for argument in forward._schema.arguments)
    on_zeros = (torch.zeros(value.shape, dtype=value.dtype) if _is_tensor(value) else value for value in arguments)
    # the forward saves nothing without gradients
    with torch.enable_grad():
        return tuple(forward(*on_zeros)[3].shape)


def _recurrent_weights(call: Call) -> list[Tensor]:
    is_lstm = not _is_tensor(call["hx"])
    output, hidden = (state.shape[-1] for state in (call["hx"] if is_lstm else [call["hx"]] * 2))
    features = call["input" if "input" in call else "data"].shape[-1]
    options = {"bias": call["has_biases"], "bidirectional": call["bidirectional"], "device": "meta"}
    if output != hidden:
        options["proj_size"] = output
    module = (nn.LSTM if is_lstm else nn.GRU)(features, hidden, call["num_layers"], **options)
    return [weight for weights in module.all_weights for weight in weights]


_FUNCTIONS: Mapping[str, Any] = {
    **{function.__name__: function for function in (abs, len, max, min, prod, sum)},
    **{str(dtype).removeprefix("torch."): dtype for dtype in (torch.int32, torch.int64, torch.uint8, torch.float16)},
    "broadcast": torch.broadcast_shapes,
    "torch_version": torch.__version__,
    "is_tensor": _is_tensor,
    "last_place": _last_place,
    "lstm_workspace": _lstm_workspace,
    "recurrent_weights": _recurrent_weights,
    "elements": lambda tensor: prod(tensor.shape),
    "shape_of": lambda tensor: tuple(tensor.shape),
    # `shape` raises for a nested tensor; `size` works for its regular dimensions
    "last_size": lambda tensor: tensor.size(-1) if isinstance(tensor, Tensor) else tensor.shape[-1],
    "are_dimensions": lambda dims, count: (
        all(-count <= dim < count for dim in dims) and len({dim % count for dim in dims}) == len(dims)
    ),
    # the lengths in a tensor are clamped
    "are_lengths": lambda lengths, batch, limit: (
        _is_tensor(lengths) or (len(lengths) == batch and all(0 <= length <= limit for length in lengths))
    ),
    "is_scale": lambda scale, before, after: isfinite(scale) and scale > 0 and abs(before * scale - after) <= 1,
}
# properties of tensors, by the words for them in the rules
_PROPERTIES = {"#": _FUNCTIONS["elements"], "last": _FUNCTIONS["last_size"], "dtype": lambda tensor: tensor.dtype}


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return _FUNCTIONS.get(name)

    def value(self, expression: str) -> Any:
        # the expression is a part of `_RULES`; a trace only provides values
        return eval(expression, {"__builtins__": {}}, self)

    def expected_shape(self, pattern: str, shape: tuple[int, ...]) -> object:
        sizes: list[Any] = []
        for word in pattern.split():
            name = word.removeprefix("*")
            if name == "_" or (name.isidentifier() and name not in self):
                sizes.append(word)
            else:
                sizes += self.value(name) if word.startswith("*") else [self.value(name)]
        for position, size in enumerate(sizes):
            if isinstance(size, str) and size.startswith("*"):
                end = max(position, len(shape) - (len(sizes) - 1 - position))
                self[size[1:]] = sizes[position : position + 1] = shape[position:end]
                break
        if len(sizes) != len(shape):
            return f"{len(sizes)} dimensions"
        for position, size in enumerate(sizes):
            if isinstance(size, str):
                self[size] = sizes[position] = shape[position]
        return tuple(sizes)

    def sizes(self, name: str, tensor: Any, rule: str) -> Iterator[Sizes]:
        kind, _, expressions = rule.partition(" ")
        if kind in _PROPERTIES:
            actual, allowed = _PROPERTIES[kind](tensor), [self.value(word) for word in expressions.split()]
            yield f"{kind} of {name}".removeprefix("# of "), actual, actual if actual in allowed else allowed[-1]
        elif kind == "memory":
            if _has_strides(tensor):
                shape, strides = tuple(tensor.shape), _strides(tensor)
                # kernels also read each item of a batch as contiguous
                for first in range(len(shape)):
                    places, elements = 1 + _last_place(shape[first:], strides[first:], 0), prod(shape[first:])
                    yield f"elements of {name} in memory", min(places, elements), elements
        elif kind == "adjacent":
            if tensor.shape[-1] > 1:
                yield f"the last stride of {name}", _strides(tensor)[-1], 1
        else:
            shape = tuple(tensor.shape)
            yield name, shape, self.expected_shape(rule, shape)


def _forward_shapes(operator: str, call: Call) -> list[tuple[int, ...]]:
    function = getattr(torch.ops.aten, operator.removeprefix("aten::").removesuffix("_backward")).default
    values = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta") if _is_tensor(value) else value
        for name, value in call.items()
    }
    if "input_sizes" in call:
        values |= {"self": torch.empty(call["input_sizes"], device="meta"), "dimension": call["dim"]}
    names = (argument.name for argument in function._schema.arguments)
    results = function(**{name: values[name] for name in names if name in values})
    return [tuple(result.shape) for result in (results if isinstance(results, tuple) else (results,))]


def required_sizes(operator: str, call: Call, rules: Iterable[str]) -> Iterator[Sizes]:
    names = _Names(call, call=call)
    for whole_rule in rules:
        rule, _, condition = whole_rule.partition(" when ")
        if condition and not names.value(condition):
            continue
        tensors, colon, kind = rule.partition(": ")
        name, equals, expression = rule.partition(" = ")
        if not colon and equals:
            names[name] = names.value(expression)
        elif not colon:
            yield rule, bool(names.value(rule)), True
        elif kind == "forward":
            for tensor, shape in zip(tensors.split(), _forward_shapes(operator, call), strict=True):
                yield tensor, tuple(call[tensor].shape), shape
        elif kind.startswith("like "):
            for tensor in (tensor for tensor in tensors.split() if tensor in call):
                shapes = [tuple(one.shape) for one in names.value(kind[5:])]
                yield f"number of {tensor}", len(call[tensor]), len(shapes)
                yield from ((tensor, tuple(one.shape), shape) for one, shape in zip(call[tensor], shapes, strict=True))
        else:
            for tensor in tensors.split():
                value = call.get(tensor)
                for one in value if isinstance(value, list | tuple) else (value,):
                    if _is_tensor(one):
                        yield from names.sizes(tensor, one, kind)
