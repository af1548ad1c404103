"""Equivalents: calls of another operator that does the same work, for operators that a device or machine lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.nn.attention import SDPBackend

from opgrip.replay.operators.admission import MMCV, Unsupported, is_installed
from opgrip.replay.operators.lookup import find_operator
from opgrip.replay.operators.torch_private import has_kernel_on
from opgrip.traces.schema.arguments import TensorSpec, tensors
from opgrip.traces.schema.records import EXTENSION, NO_STORAGE, OPERATOR, Signature
from opgrip.traces.schema.tensor_specs import plain_name

Call: TypeAlias = Mapping[str, Any]  # arguments of a call by name


@dataclass(frozen=True, slots=True)
class Equivalent:
    """A call that replaces a recorded call and does the same work.

    argument_indices : for each tensor argument, its index among the recorded call's tensors; None for a new tensor
    """

    signature: Signature
    argument_indices: tuple[int | None, ...]
    result_count: int
    unused: frozenset[int]
    note: str

    def memory_of(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(NO_STORAGE if place is None else inputs[place] for place in self.argument_indices), outputs[
            : self.result_count
        ]


@dataclass(frozen=True, slots=True)
class _Conversion:
    op: str
    changes: Call
    outputs: tuple[Any, ...]
    remark: str = ""


def equivalent_on(signature: Signature, device: str) -> Equivalent | None:
    """Return the call that replaces a recorded call on a device; None if no call replaces it."""
    if signature.kind not in (EXTENSION, OPERATOR):
        return None
    try:
        if signature.kind == EXTENSION:
            module, _, name = signature.op.partition(":")
            return None if module != MMCV or is_installed(MMCV) else _of_torchvision(signature, name)
        name = signature.op.removeprefix("aten.").removesuffix(".default")
        if name not in _CONVERSIONS:
            return None
        function: Any = find_operator(signature).function
        if name not in _NORMS and has_kernel_on(function, torch.device(device).type):
            return None
        call = _named(function._schema, signature)
        conversion = _CONVERSIONS[name](name, call, _outputs_of(signature), device)
        return None if conversion is None else _equivalent(signature, call, conversion)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    # a trace may hold any arguments; the recorded operator then reports what is wrong with them
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError):
        return None


FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"
# operators of fused attention on accelerators, by the kind that torch chooses
ATTENTIONS = {
    SDPBackend.FLASH_ATTENTION: "_scaled_dot_product_flash_attention",
    SDPBackend.EFFICIENT_ATTENTION: "_scaled_dot_product_efficient_attention",
    SDPBackend.CUDNN_ATTENTION: "_scaled_dot_product_cudnn_attention",
    SDPBackend.OVERRIDEABLE: "_scaled_dot_product_fused_attention_overrideable",
}
MATH = "_scaled_dot_product_attention_math"
BACKWARD = "_backward"


def _attention(name: str, call: Call, outputs: tuple[Any, ...], device: str) -> _Conversion:
    ending = BACKWARD if name.endswith(BACKWARD) else ""
    query, keys, mask = call["query"], call["key"].shape[2], call["attn_mask"]
    batch, heads, length, _ = query.shape
    shares_heads = heads != call["key"].shape[1]
    changes: dict[str, Any] = {
        "grad_input_mask": [True, True, True, False],
        "compute_log_sumexp": True,
        "return_debug_mask": False,
        "enable_gqa": shares_heads,
        "cum_seq_q": None,
        "cum_seq_k": None,
        "max_q": length,
        "max_k": keys,
        **dict.fromkeys(("philox_seed", "philox_offset"), TensorSpec((), (), torch.int64, query.device)),
    }
    if torch.device(device).type == "cpu":
        sums = _LogSums((batch, heads, length), (length * heads, 1, heads))
        # the kernel for the CPU has no dropout
        remark = "without dropout" if call["dropout_p"] else ""
        changes |= {"dropout_p": 0.0, **sums.argument(call)}
        return _Conversion(f"aten.{FOR_CPU}{ending}.default", changes, sums.results(outputs, ending), remark)
    backend = _choice(call, device, shares_heads, wants_gradients=bool(ending))
    # members that are made from numbers are equal to the named ones, but not identical
    if backend == SDPBackend.MATH and not ending:
        return _Conversion(f"aten.{MATH}.default", changes, outputs[:1])
    sums = _LogSums.of((batch, heads, length), backend)
    full = (batch, heads, length, keys)
    changes |= {"attn_mask": None if mask is None else _expanded(mask, full), **sums.argument(call)}
    return _Conversion(f"aten.{ATTENTIONS[backend]}{ending}.default", changes, sums.results(outputs, ending))


@dataclass(frozen=True, slots=True)
class _LogSums:
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(shape: tuple[int, int, int], backend: SDPBackend) -> _LogSums:
        batch, heads, length = shape
        if backend == SDPBackend.EFFICIENT_ATTENTION:
            length = _multiple(length, 32)
        contiguous = (heads * length, length, 1)
        if backend == SDPBackend.CUDNN_ATTENTION:
            return _LogSums((batch, heads, length, 1), (*contiguous, 1))
        return _LogSums((batch, heads, length), contiguous)

    def laid_out(self, spec: Any) -> Any:
        return replace(spec, shape=self.shape, stride=self.stride, offset=0, storage=None)

    def argument(self, call: Call) -> Call:
        return {"logsumexp": self.laid_out(call["logsumexp"])} if "logsumexp" in call else {}

    def results(self, outputs: tuple[Any, ...], ending: str) -> tuple[Any, ...]:
        return outputs[:3] if ending or not outputs else (outputs[0], self.laid_out(outputs[1]))


def _choice(call: Call, device: str, shares_heads: bool, wants_gradients: bool) -> SDPBackend:
    def empty(spec: TensorSpec) -> torch.Tensor:
        tensor = torch.empty_strided(spec.shape, spec.stride or (), dtype=spec.dtype, device=device)
        return tensor.requires_grad_(spec.requires_grad or wants_gradients)

    query, key, value = (empty(call[name]) for name in ("query", "key", "value"))
    mask = None if call["attn_mask"] is None else empty(call["attn_mask"]).detach()
    arguments = (query, key, value, mask, call["dropout_p"], call["is_causal"])
    chosen = torch.ops.aten._fused_sdp_choice.default(*arguments, scale=call["scale"], enable_gqa=shares_heads)
    return SDPBackend(chosen)


def _expanded(mask: TensorSpec, full: tuple[int, ...]) -> TensorSpec:
    assert mask.stride is not None, "the kernels take strided tensors"
    if mask.shape == full and not any(step % 16 for step in mask.stride[:-1]):
        return mask
    own = (1,) * (len(full) - len(mask.shape)) + mask.shape
    row = _multiple(own[-1], 16)
    steps = (own[1] * own[2] * row, own[2] * row, row, 1)
    stride = tuple(0 if size == 1 else step for size, step in zip(own, steps, strict=True))
    return replace(mask, shape=full, stride=stride, offset=0, storage=None)


def _multiple(size: int, step: int) -> int:
    return -(-size // step) * step


def _batch_norm(name: str, call: Call, outputs: tuple[Any, ...], device: str) -> _Conversion:
    ending = BACKWARD if name.endswith(BACKWARD) else ""
    changes = {"train": True, "output_mask": [True, True, True]}
    return _Conversion(f"aten.native_batch_norm{ending}.default", changes, outputs[:3])


_NORMS = [f"native_{kind}_norm{ending}" for kind in ("layer", "group") for ending in ("", BACKWARD)]


def _norm(name: str, call: Call, outputs: tuple[Any, ...], device: str) -> _Conversion | None:
    dtype, weight = call["input"].dtype, call["weight"]
    if dtype.itemsize != 2 or not outputs or torch.device(device).type not in ("cpu", "cuda"):
        return None
    is_mixed = weight is not None and weight.dtype != dtype
    own = dtype if torch.device(device).type == "cpu" and not is_mixed else torch.float32
    statistics = [call["mean"], call["rstd"]] if name.endswith(BACKWARD) else outputs[1:]
    if all(spec.dtype == own for spec in statistics):
        return None
    first, second = (replace(spec, dtype=own, storage=None) for spec in statistics)
    changes = {"mean": first, "rstd": second} if name.endswith(BACKWARD) else {}
    results = outputs if changes else (outputs[0], first, second)
    return _Conversion(f"aten.{name}.default", changes, results, f"statistics in {plain_name(own)}")


_CONVERSIONS: Mapping[str, Callable[[str, Call, tuple[Any, ...], str], _Conversion | None]] = {
    **dict.fromkeys(_NORMS, _norm),
    **{f"{name}{ending}": _attention for name in (FOR_CPU, *ATTENTIONS.values()) for ending in ("", BACKWARD)},
    **{f"{name}_batch_norm{ending}": _batch_norm for name in ("cudnn", "miopen") for ending in ("", BACKWARD)},
}
# common names for arguments that have different names in some of torch's operators
_COMMON = {
    "attn_bias": "attn_mask",
    "grad_out_": "grad_out",
    "grad_output": "grad_out",
    "exponential_average_factor": "momentum",
    "epsilon": "eps",
    "save_var": "save_invstd",
}


def _named(schema: Any, signature: Signature) -> dict[str, Any]:
    names = [argument.name for argument in schema.arguments]
    call = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    arguments = {**dict(zip(names, signature.args, strict=False)), **signature.kwargs}
    # in the order of the recorded arguments, by which their tensors are counted
    ordered = {**arguments, **{name: value for name, value in call.items() if name not in arguments}}
    return {_COMMON.get(name, name): value for name, value in ordered.items()}


def _outputs_of(signature: Signature) -> tuple[Any, ...]:
    outputs = signature.outputs
    return tuple(outputs) if isinstance(outputs, list | tuple) else (outputs,) * isinstance(outputs, TensorSpec)


def _equivalent(signature: Signature, recorded: Call, conversion: _Conversion) -> Equivalent | None:
    own = replace(signature, kind=OPERATOR, op=conversion.op)
    try:
        schema = find_operator(own).function._schema  # type: ignore[attr-defined]
    except Unsupported:
        return None
    places = {name: place for place, name in enumerate(_tensor_names(recorded))}
    call = {**recorded, **conversion.changes}
    args, kwargs, indices = [], {}, []
    for argument in schema.arguments:
        name = _COMMON.get(argument.name, argument.name)
        value = argument.default_value if name not in call and argument.has_default_value() else call[name]
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
        if isinstance(value, TensorSpec):
            indices.append(places.get(name))
    count, results = len(schema.returns), conversion.outputs
    outputs: Any = results[0] if results and count == 1 else (*results, *[None] * (count - len(results)))
    return Equivalent(
        replace(own, args=tuple(args), kwargs=kwargs, outputs=outputs if results else signature.outputs),
        tuple(indices),
        len(results),
        frozenset(range(len(results), count)) if results else frozenset(),
        ", ".join(filter(None, (f"as {own.op}" if own.op != signature.op else "", conversion.remark))),
    )


def _tensor_names(call: Call) -> Iterator[str]:
    for name, value in call.items():
        for _ in tensors(value):
            yield name


# names in torchvision of the positional arguments of mmcv's functions; mmcv's own names if torchvision has no such
# argument
_TENSORS_OF_MMCV = {
    "nms": "dets scores",
    "roi_align_forward": "input rois output argmax_y argmax_x",
    "roi_align_backward": "grad rois argmax_y argmax_x grad_input",
    "deform_conv_forward": "input weight offset output columns ones",
    "deform_conv_backward_input": "input offset grad grad_input grad_offset weight columns",
    "deform_conv_backward_parameters": "input offset grad grad_weight columns ones",
    "modulated_deform_conv_forward": "input weight bias ones offset mask output columns",
    "modulated_deform_conv_backward": "input weight bias ones offset mask columns"
    " grad_input grad_weight grad_bias grad_offset grad_mask grad",
}
# names in torchvision of mmcv's other arguments
_IN_TORCHVISION = {
    "aligned_height": "pooled_height",
    "aligned_width": "pooled_width",
    "dH": "stride_h",
    "dW": "stride_w",
    "padH": "pad_h",
    "padW": "pad_w",
    "dilationH": "dilation_h",
    "dilationW": "dilation_w",
    "group": "groups",
    "deformable_group": "offset_groups",
}
AVERAGE = 1  # value of mmcv's `pool_mode` that torchvision supports


def _of_torchvision(signature: Signature, name: str) -> Equivalent | None:
    names = _TENSORS_OF_MMCV.get(name, "").split()
    if len(names) != len(signature.args):
        return None
    others = {_IN_TORCHVISION.get(key, key): value for key, value in signature.kwargs.items()}
    if not others.get("with_bias"):
        # an empty tensor
        names = ["no_bias" if own == "bias" else own for own in names]
    call = {**dict(zip(names, signature.args, strict=True)), **others}
    # mmcv has variants that torchvision lacks
    if (call.get("offset") not in (0, None) and name == "nms") or call.get("pool_mode", AVERAGE) != AVERAGE:
        return None
    conversion = _deformed(name, call) if "deform" in name else _region(name, call, _outputs_of(signature))
    return _equivalent(signature, call, conversion)


def _region(name: str, call: Call, outputs: tuple[Any, ...]) -> _Conversion:
    if name == "nms":
        return _Conversion("torchvision.nms.default", {}, outputs)
    if name == "roi_align_forward":
        return _Conversion("torchvision.roi_align.default", {}, (call["output"],))
    sizes = dict(zip(("batch_size", "channels", "height", "width"), call["grad_input"].shape, strict=True))
    return _Conversion("torchvision._roi_align_backward.default", sizes, (call["grad_input"],))


def _deformed(name: str, call: Call) -> _Conversion:
    images, has_mask = call["input"], name.startswith("modulated")
    # calls that compute the weight's gradient have no weight, which has the same shape
    weight = call.get("weight", call.get("grad_weight"))

    def new_tensor(*shape: int) -> TensorSpec:
        return TensorSpec(shape, (*shape[1:], 1), images.dtype, images.device)

    changes: dict[str, Any] = {"weight": weight, "use_mask": has_mask}
    # torchvision needs tensors for a mask and a bias that it ignores
    if not has_mask:
        changes["mask"] = new_tensor(images.shape[0], 1)
    if "bias" not in call:
        changes["bias"] = new_tensor(weight.shape[0])
    if name.endswith("forward"):
        return _Conversion("torchvision.deform_conv2d.default", changes, (call["output"],))
    arguments = {**call, **changes}
    gradients = tuple(arguments[argument] for argument in ("input", "weight", "offset", "mask", "bias"))
    remark = "" if has_mask else "which computes all gradients"
    return _Conversion("torchvision._deform_conv2d_backward.default", changes, gradients, remark)
