"""Sizes of arguments that operators trust to agree: which a call has says a trace, a stranger's perhaps.

Found by calling torch's operators with sizes that do not agree, and seeing which of them read or wrote foreign memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import isfinite, prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from opgrip.replay.operators.admission import Unsupported
from opgrip.traces.arguments import TensorSpec

Call: TypeAlias = Mapping[str, Any]
"""What a call takes, by the names of the operator's schema: tensors, or what a trace says of them."""
Sizes: TypeAlias = tuple[str, object, object]
"""A name, what it has, and what it should have."""
Check: TypeAlias = Callable[[Call], Iterator[Sizes]]


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor | TensorSpec)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape)


def _shapes(call: Call, expected: tuple[int, ...], *names: str) -> Iterator[Sizes]:
    for name in names:
        if _is_tensor(call.get(name)):
            yield name, _shape(call[name]), expected


def _elements(call: Call, expected: int, *names: str) -> Iterator[Sizes]:
    for name in names:
        if _is_tensor(call.get(name)):
            yield name, prod(_shape(call[name])), expected


def _optimizer(call: Call) -> Iterator[Sizes]:
    """Lists of tensors with one for each parameter, some of which may be empty."""
    expected = [_shape(parameter) for parameter in call["self"]]
    needed = {"grads", "exp_avgs", "exp_avg_sqs", "state_sums", "state_steps"}
    if call.get("amsgrad"):
        needed.add("max_exp_avg_sqs")
    if call.get("momentum"):
        needed.add("momentum_buffer_list")
    for name in sorted(needed | {"max_exp_avg_sqs", "momentum_buffer_list"}):
        if name not in call or (not call[name] and name not in needed):
            continue
        yield name, len(call[name]), len(expected)
        for tensor, shape in zip(call[name], expected, strict=False):
            yield name, *((prod(_shape(tensor)), 1) if name == "state_steps" else (_shape(tensor), shape))
    yield from _elements(call, 1, "lr", "grad_scale", "found_inf")


def _upsample(call: Call) -> Iterator[Sizes]:
    """Scales by which the output is about as large as it is, in as many dimensions as it has."""
    if "output_size" not in call or "input" in call:
        # this overload computes the one from the other
        return
    input_size = tuple(call["input_size"]) if "input_size" in call else _shape(call["self"])
    output_size = tuple(call["output_size"])
    yield "input", len(input_size), len(output_size) + 2
    yield from _shapes(call, (*input_size[:2], *output_size), "grad_output")
    names = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}[len(output_size)]
    for name, before, after in zip(names, input_size[2:], output_size, strict=True):
        scale = call.get(name)
        if scale is not None and not (isfinite(scale) and scale > 0 and abs(before * scale - after) <= 1):
            yield name, scale, f"about {after}/{before}"


def _batch_norm(call: Call) -> Iterator[Sizes]:
    shape = _shape(call["input"])
    channels = shape[1]
    yield from _elements(call, channels, "weight", "bias", "running_mean", "running_var", "mean", "invstd")
    yield from _shapes(call, shape, "grad_out", "grad_output")
    trains = call.get("train", call.get("training", call.get("update", True)))
    for name in ("save_mean", "save_invstd", "save_var"):
        # evaluation keeps none
        if trains or (_is_tensor(call.get(name)) and prod(_shape(call[name]))):
            yield from _elements(call, channels, name)


def _layer_norm(call: Call) -> Iterator[Sizes]:
    shape, normalized = _shape(call["input"]), tuple(call["normalized_shape"])
    yield "normalized_shape", normalized, shape[len(shape) - len(normalized) :]
    yield from _shapes(call, normalized, "weight", "bias")
    yield from _shapes(call, shape, "grad_out")
    yield from _elements(call, prod(shape[: len(shape) - len(normalized)]), "mean", "rstd")


def _group_norm(call: Call) -> Iterator[Sizes]:
    batch, channels, groups = call["N"], call["C"], call["group"]
    yield "N, C and HxW", batch * channels * call["HxW"], prod(_shape(call["input"]))
    yield "C modulo group", channels % groups if groups > 0 else None, 0
    yield from _shapes(call, _shape(call["input"]), "grad_out")
    yield from _elements(call, channels, "weight", "bias")
    yield from _elements(call, batch * groups, "mean", "rstd")


def _weight_norm(call: Call) -> Iterator[Sizes]:
    shape = _shape(call["v"] if "v" in call else call["saved_v"])
    yield from _shapes(call, shape, "grad_w")
    yield from _elements(call, shape[call.get("dim", 0)], "g", "saved_g", "saved_norms")


def _attention(call: Call) -> Iterator[Sizes]:
    query, key, value = (_shape(call[name]) for name in ("query", "key", "value"))
    for name, shape in (("query", query), ("key", key), ("value", value)):
        yield f"dimensions of {name}", len(shape), 4
    yield "batch of key", key[0], query[0]
    yield "head size of key", key[3], query[3]
    yield "value", value[:3], key[:3]
    # several heads of a query may share one of a key
    yield "heads of query modulo those of key", query[1] % key[1] if key[1] else query[1], 0
    yield from _shapes(call, (*query[:3], value[3]), "grad_out", "grad_out_", "out")


def _attention_for_cpu(call: Call) -> Iterator[Sizes]:
    yield from _attention(call)
    yield "value", _shape(call["value"]), _shape(call["key"])
    yield from _elements(call, prod(_shape(call["query"])[:3]), "logsumexp")


def _rnn(call: Call) -> Iterator[Sizes]:
    """An LSTM's layer; others have no kernel of this."""
    inputs, hidden = _shape(call["input"]), call["hidden_size"]
    places = (0, 1, 2, 3) if "weight0" in call else (1, 2, 3, 4)
    first, second, *biases = (f"weight{place}" for place in places)
    yield "mode", call["mode"], 2
    yield "dimensions of input", len(inputs), 3
    yield from _shapes(call, (4 * hidden, inputs[2]), first)
    yield from _shapes(call, (4 * hidden, hidden), second)
    if call["has_biases"]:
        yield from _shapes(call, (4 * hidden,), *biases)
    yield from _elements(call, inputs[1] * hidden, "hx_", "cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy")
    yield from _shapes(call, (*inputs[:2], hidden), "output", "grad_output")


def _pooled_planes(dimensions: int) -> Check:
    def check(call: Call) -> Iterator[Sizes]:
        shape = _shape(call["self"])
        yield "grad_output", _shape(call["grad_output"])[:-dimensions], shape[:-dimensions]

    return check


def _grid(call: Call) -> Iterator[Sizes]:
    yield from _shapes(call, (*_shape(call["input"])[:2], *_shape(call["grid"])[1:-1]), "grad_output")


def _pairwise(call: Call) -> Iterator[Sizes]:
    rows = _shape(call["self"])[0]
    yield from _elements(call, rows * (rows - 1) // 2, "grad", "grad_output", "pdist")


def _distances(call: Call) -> Iterator[Sizes]:
    one, other = _shape(call["x1"]), _shape(call["x2"])
    yield "size of x2", other[-1], one[-1]
    yield from _elements(call, prod(_shape(call["cdist"])), "grad")
    yield "cdist", _shape(call["cdist"])[-2:], (one[-2], other[-2])


_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm")
_UPSAMPLES = (
    *(f"upsample_{kind}" for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
    *(f"{name}{n}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)),
    *(f"_upsample_{kind}2d_aa" for kind in ("bilinear", "bicubic", "lanczos")),
)
_OPTIMIZERS = ("adam", "adamw", "sgd", "adagrad")
_ATTENTIONS = ("flash", "efficient", "cudnn", "fused")

CHECKS: Mapping[str, Check] = {
    **{f"aten::_fused_{name}{ending}": _optimizer for name in _OPTIMIZERS for ending in ("", "_")},
    **{f"aten::{name}{ending}": _upsample for name in _UPSAMPLES for ending in ("", "_backward")},
    **{f"aten::{name}{ending}": _batch_norm for name in _NORMS for ending in ("", "_backward")},
    **{f"aten::_native_batch_norm_legit{ending}": _batch_norm for ending in ("", "_functional", "_no_training")},
    **{f"aten::_batch_norm_{name}": _batch_norm for name in ("no_update", "with_update", "with_update_functional")},
    "aten::batch_norm_update_stats": _batch_norm,
    "aten::batch_norm_elemt": _batch_norm,
    **{f"aten::native_layer_norm{ending}": _layer_norm for ending in ("", "_backward")},
    **{f"aten::_fused_rms_norm{ending}": _layer_norm for ending in ("", "_backward")},
    **{f"aten::native_group_norm{ending}": _group_norm for ending in ("", "_backward")},
    **{f"aten::_weight_norm_{ending}": _weight_norm for ending in ("interface", "interface_backward")},
    **{
        f"aten::_scaled_dot_product_{name}_attention{ending}": _attention
        for name in _ATTENTIONS
        for ending in ("", "_backward", "_overrideable", "_overrideable_backward")
    },
    **{
        f"aten::_scaled_dot_product_flash_attention_for_cpu{ending}": _attention_for_cpu for ending in ("", "_backward")
    },
    **{f"aten::mkldnn_rnn_layer{ending}": _rnn for ending in ("", "_backward")},
    "aten::_adaptive_avg_pool2d_backward": _pooled_planes(2),
    "aten::_adaptive_avg_pool3d_backward": _pooled_planes(3),
    "aten::grid_sampler_2d_backward": _grid,
    "aten::_grid_sampler_2d_cpu_fallback_backward": _grid,
    "aten::grid_sampler_3d_backward": _grid,
    "aten::_pdist_backward": _pairwise,
    "aten::_cdist_backward": _distances,
}
"""By operator, what must agree."""


def check_agreement(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Hold the sizes of a call's arguments against each other, where its operator does not.

    Raises
    ------
    Unsupported : where they do not agree
    """
    schema = getattr(function, "_schema", None)
    if schema is None or schema.name not in CHECKS:
        return
    call = {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **kwargs}
    try:
        for name, actual, expected in CHECKS[schema.name](call):
            if actual != expected:
                raise Unsupported(f"its sizes do not agree: {name} has {actual} where {expected} fits")
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise Unsupported(f"its sizes cannot be held against each other ({error})") from error


class CheckedRun(fx.Interpreter):
    """Runs a unit's graph once, and checks each call before it is made: sizes inside may differ from those recorded."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call gives."""
        check_agreement(target, args, kwargs)
        return super().call_function(target, args, kwargs)


def is_checked(graph: fx.Graph) -> bool:
    """Whether a graph calls an operator whose sizes must be held against each other."""
    return any(getattr(getattr(node.target, "_schema", None), "name", None) in CHECKS for node in graph.nodes)


def check_graph(module: fx.GraphModule, args: tuple[Any, ...]) -> None:
    """Run a unit's graph once with its calls checked, where it calls what needs it."""
    if is_checked(module.graph):
        with torch.no_grad():
            CheckedRun(module).run(*args)
