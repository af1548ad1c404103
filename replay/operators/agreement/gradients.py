"""Checks that the sizes of gradients and optimizer tensors match the forward call or the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from opgrip.replay.operators.agreement.layers import Call, Check, Sizes, elements, is_tensor, shape_of, shapes


def optimizer(call: Call) -> Iterator[Sizes]:
    """Yield the actual and the expected sizes of an optimizer's lists, which have one tensor of the right shape per
    parameter; optional lists may be empty.
    """
    expected = [shape_of(parameter) for parameter in call["self"]]
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
            yield name, *((prod(shape_of(tensor)), 1) if name == "state_steps" else (shape_of(tensor), shape))
    yield from elements(call, 1, "lr", "grad_scale", "found_inf")


@dataclass(frozen=True, slots=True)
class Forward:
    """The forward operator that belongs to a backward operator.

    name : name of the forward operator
    results : for each result of the forward operator, the names of the backward's arguments that must have its shape
    """

    name: str
    results: tuple[tuple[str, ...], ...] = (("grad_output",),)


_POOLED = (("grad_output",), ("indices",))
# forward operator by backward operator; arguments with the same name in both have the same sizes
FORWARDS: Mapping[str, Forward] = {
    **{f"aten::avg_pool{n}d_backward": Forward(f"avg_pool{n}d") for n in (2, 3)},
    **{f"aten::max_pool{n}d_with_indices_backward": Forward(f"max_pool{n}d_with_indices", _POOLED) for n in (2, 3)},
    **{
        f"aten::{kind}_pad{n}d_backward": Forward(f"{kind}_pad{n}d")
        for kind in ("reflection", "replication")
        for n in (1, 2, 3)
    },
    "aten::unfold_backward": Forward("unfold", (("grad_in",),)),
}


def _on_meta(value: Any) -> Any:
    return torch.empty(shape_of(value), dtype=value.dtype, device="meta") if is_tensor(value) else value


def as_forward(forward: Forward) -> Check:
    """Return a check that some arguments of a backward operator have the shapes of the results of the forward
    operator.
    """
    function = getattr(torch.ops.aten, forward.name).default

    def check(call: Call) -> Iterator[Sizes]:
        inputs = {**call}
        if "input_sizes" in call:
            inputs |= {"self": torch.empty(call["input_sizes"], device="meta"), "dimension": call["dim"]}
        arguments = {
            argument.name: _on_meta(inputs[argument.name])
            for argument in function._schema.arguments
            if argument.name in inputs
        }
        results = function(**arguments)
        for names, result in zip(forward.results, results if isinstance(results, tuple) else (results,), strict=True):
            yield from shapes(call, tuple(result.shape), *names)

    return check


def pooled_planes(dimensions: int) -> Check:
    """Return a check that the gradient of a pooling has the same batch size and channels as its input.

    dimensions : number of pooled dimensions
    """

    def check(call: Call) -> Iterator[Sizes]:
        shape = shape_of(call["self"])
        grad = shape_of(call["grad_output"])
        yield "dimensions of grad_output", len(grad), len(shape)
        yield "grad_output", grad[:-dimensions], shape[:-dimensions]
        yield from shapes(call, grad, "indices")
        if "output_size" in call:
            yield "grad_output", grad[-dimensions:], tuple(call["output_size"])
        yield "places to pool, any", prod(shape) > 0 or not prod(grad), True

    return check


def pooled_to(dimensions: int) -> Check:
    """Return a check that `output_size` contains one size per pooled dimension."""

    def check(call: Call) -> Iterator[Sizes]:
        yield "output_size", len(call["output_size"]), dimensions

    return check


def grid(call: Call) -> Iterator[Sizes]:
    yield from shapes(call, (*shape_of(call["input"])[:2], *shape_of(call["grid"])[1:-1]), "grad_output")


def pairwise(call: Call) -> Iterator[Sizes]:
    rows = shape_of(call["self"])[0]
    pairs = (rows * (rows - 1) // 2,)
    yield from shapes(call, pairs, "grad", "grad_output", "pdist")


def distances(call: Call) -> Iterator[Sizes]:
    one, other = shape_of(call["x1"]), shape_of(call["x2"])
    yield "size of x2", other[-1], one[-1]
    batch = tuple(torch.broadcast_shapes(one[:-2], other[:-2]))
    yield from shapes(call, (*batch, one[-2], other[-2]), "cdist", "grad")


def of_output(*names: str) -> Check:
    """Return a check that the gradient has the shape of the named arguments, which are results of the forward call."""

    def check(call: Call) -> Iterator[Sizes]:
        for name in names:
            if is_tensor(call.get(name)):
                yield from shapes(call, shape_of(call[name]), "grad_output", "grad", "grad_out")

    return check


def segments(call: Call) -> Iterator[Sizes]:
    data, axis = shape_of(call["data"]), call.get("axis", 0)
    ends = call.get("lengths") if is_tensor(call.get("lengths")) else call["offsets"]
    count = shape_of(ends)[-1] - (not is_tensor(call.get("lengths")))
    yield "axis", axis, len(shape_of(ends)) - 1
    yield "segments of the dimensions before", shape_of(ends)[:-1], data[:axis]
    yield from shapes(call, (*data[:axis], count, *data[axis + 1 :]), "grad", "output")


def ctc(call: Call) -> Iterator[Sizes]:
    time, batch, classes = shape_of(call["log_probs"])
    targets = shape_of(call["targets"])
    yield f"blank from 0 to {classes - 1}", 0 <= call["blank"] < classes, True
    for name in ("input_lengths", "target_lengths"):
        lengths = call[name]
        yield name, shape_of(lengths) if is_tensor(lengths) else (len(lengths),), (batch,)
        if not is_tensor(lengths):
            limit = time if name == "input_lengths" else targets[-1]
            yield f"{name} from 0 to {limit}", all(0 <= length <= limit for length in lengths), True
    if len(targets) > 1:
        yield "targets", targets[:-1], (batch,)
    elif not is_tensor(call["target_lengths"]):
        yield "the sum of target_lengths up to that of targets", sum(call["target_lengths"]) <= targets[0], True
    yield from elements(call, batch, "grad", "neg_log_likelihood")
    if is_tensor(call.get("log_alpha")):
        states = shape_of(call["log_alpha"])
        yield "log_alpha", (states[:2], states[2] % 2), ((batch, time), 1)
        if not is_tensor(call["target_lengths"]):
            limit = states[2] // 2
            yield f"target_lengths up to {limit}", all(length <= limit for length in call["target_lengths"]), True


def matmul_int4(call: Call) -> Iterator[Sizes]:
    """Yield the actual and the expected sizes of a product with a 4-bit matrix whose scales apply to groups along the
    summed dimension.
    """
    inner, group = shape_of(call["self"])[-1], call["qGroupSize"]
    columns = shape_of(call["mat2"])[0]
    yield "qGroupSize in that of self", inner % group if group > 0 else None, 0
    yield from elements(call, columns * inner // 2, "mat2")
    yield from shapes(call, (inner // group, columns, 2), "qScaleAndZeros")


def matmul_4bit(call: Call) -> Iterator[Sizes]:
    """Yield the actual and the expected sizes of a product with a packed 4-bit matrix, which contains its scales and a
    bias.
    """
    block, inner, columns = call["block_size"], call["in_features"], call["out_features"]
    weight = call["packed_weights"]
    yield "sizes of inp but the first", shape_of(call["inp"])[1:], (inner,)
    yield "numbers above 0", min(block, inner, columns) > 0, True
    yield "block_size in in_features", inner % block, 0
    scales = 0 if weight.dtype == torch.uint8 else columns * (inner // block)
    yield "packed_weights enough", prod(shape_of(weight)) >= columns * inner // 2 + scales, True


def bag(call: Call) -> Iterator[Sizes]:
    yield ("any bags for indices", prod(shape_of(call["offsets"])) > 0 or not prod(shape_of(call["indices"])), True)


def bag_of_rows(call: Call) -> Iterator[Sizes]:
    yield from shapes(call, shape_of(call["indices"]), "per_sample_weights")


def bag_gradient(call: Call) -> Iterator[Sizes]:
    indices, grad = shape_of(call["indices"]), shape_of(call["grad"])
    yield "dimensions of grad", len(grad), 2
    rows, table = grad[0], call["num_weights"] if "num_weights" in call else shape_of(call["weight"])[0]
    yield "rows of the table, any", table > 0 or not prod(indices), True
    for name in ("indices", "offsets", "offset2bag"):
        if is_tensor(call.get(name)):
            yield f"integers of {name}", call[name].dtype in (torch.int32, torch.int64), True
    yield from elements(call, rows, "bag_size")
    yield from shapes(call, indices, "per_sample_weights")
    places = shape_of(call["offset2bag"])
    yield "offset2bag", places, indices if prod(places) else places
    if is_tensor(call.get("offsets")):
        offsets = prod(shape_of(call["offsets"]))
        yield "offsets", offsets, offsets if offsets - rows in (0, 1) else rows
    if call.get("mode") == 2 and is_tensor(call.get("maximum_indices")):
        yield from shapes(call, grad, "maximum_indices")
    if is_tensor(call.get("weight")):
        yield "grad", grad[1:], shape_of(call["weight"])[1:]


def numbered(call: Call) -> Iterator[Sizes]:
    yield "numel", call["numel"], min(max(call["numel"], 0), prod(shape_of(call["input"])))


def observed(call: Call) -> Iterator[Sizes]:
    """Yield the actual and the expected number of elements of scale, zero point, minimum and maximum of a fake
    quantization that observes ranges: one per channel, or one in all. Minimum and maximum may be empty.
    """
    count = shape_of(call["self"])[call["ch_axis"]] if call["per_row_fake_quant"] else 1
    yield from elements(call, count, "scale", "zero_point")
    for name in ("running_min", "running_max"):
        if prod(shape_of(call[name])):
            yield from elements(call, count, name)
    yield from elements(call, 1, "observer_on", "fake_quant_on")
