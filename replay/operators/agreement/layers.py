"""Checks of sizes for attention, recurrent layers, normalizations, matrices and spectra, and functions that all checks
share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import isfinite, prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.traces.schema.arguments import TensorSpec

Call: TypeAlias = Mapping[str, Any]  # arguments of a call by name: tensors, or their specs
Sizes: TypeAlias = tuple[str, object, object]  # name of a property, its actual value, and its expected value
# function that yields properties of a call; the call is not run unless all have their expected values
Check: TypeAlias = Callable[[Call], Iterator[Sizes]]


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor | TensorSpec)


def shape_of(value: Any) -> tuple[int, ...]:
    return tuple(value.shape)


def shapes(call: Call, expected: tuple[int, ...], *names: str) -> Iterator[Sizes]:
    """Yield the actual and the expected shape of each named argument that is a tensor."""
    for name in names:
        if is_tensor(call.get(name)):
            yield name, shape_of(call[name]), expected


def elements(call: Call, expected: int, *names: str) -> Iterator[Sizes]:
    """Yield the actual and the expected number of elements of each named argument that is a tensor."""
    for name in names:
        if is_tensor(call.get(name)):
            yield name, prod(shape_of(call[name])), expected


def dtypes(call: Call, expected: torch.dtype, *names: str) -> Iterator[Sizes]:
    """Yield the actual and the expected dtype of each named argument that is a tensor."""
    for name in names:
        if is_tensor(call.get(name)):
            yield name, call[name].dtype, expected


def own_memory(*names: str) -> Check:
    """Return a check that the named arguments have memory for each of their elements (no stride of 0), because the
    kernel reads that memory as contiguous.
    """

    def check(call: Call) -> Iterator[Sizes]:
        for name in names:
            value = call.get(name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if is_tensor(tensor) and _has_strides(tensor):
                    count = prod(shape_of(tensor))
                    yield f"elements of {name} in memory", min(_places(tensor), count), count

    return check


def ends_in_a_row(call: Call, *names: str) -> Iterator[Sizes]:
    """Yield the actual last stride of each named argument, and 1, the stride of elements that are adjacent in
    memory.
    """
    for name in names:
        tensor = call.get(name)
        if is_tensor(tensor) and shape_of(tensor)[-1] > 1:
            yield f"the last stride of {name}", _strides(tensor)[-1], 1


def both(*checks: Check) -> Check:
    def check(call: Call) -> Iterator[Sizes]:
        for one in checks:
            yield from one(call)

    return check


def _has_strides(tensor: Any) -> bool:
    if isinstance(tensor, TensorSpec):
        return tensor.stride is not None
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_mkldnn


def _places(tensor: Any) -> int:
    """Return how many elements of memory lie between the first and the last element of a strided tensor,
    both included.
    """
    if 0 in tensor.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape_of(tensor), _strides(tensor), strict=True))


def _strides(tensor: Any) -> tuple[int, ...]:
    return tuple((tensor.stride or ()) if isinstance(tensor, TensorSpec) else tensor.stride())


def attention(call: Call) -> Iterator[Sizes]:
    query, key, value = (shape_of(call[name]) for name in ("query", "key", "value"))
    for name, shape in (("query", query), ("key", key), ("value", value)):
        yield f"dimensions of {name}", len(shape), 4
    yield "batch of key", key[0], query[0]
    yield "head size of key", key[3], query[3]
    yield "value", value[:3], key[:3]
    # several heads of a query may share one head of a key
    yield "heads of query modulo heads of key", query[1] % key[1] if key[1] else query[1], 0
    yield from shapes(call, (*query[:3], value[3]), "grad_out", "grad_out_", "out")


def attention_for_cpu(call: Call) -> Iterator[Sizes]:
    """Yield the actual and the expected sizes of attention on the CPU, whose kernel steps from head to head without
    checking bounds.
    """
    yield from attention(call)
    yield "value", shape_of(call["value"]), shape_of(call["key"])
    yield from shapes(call, shape_of(call["query"])[:3], "logsumexp")
    yield from ends_in_a_row(call, "query", "key", "value", "out")


def _last_size(value: Any) -> int:
    # `shape` raises for a nested tensor; `size` works for its regular dimensions
    return int(value.size(-1)) if isinstance(value, Tensor) else int(value.shape[-1])


def projected(call: Call) -> Iterator[Sizes]:
    """Yield the actual and the expected sizes of attention whose projected queries, keys and values are in one tensor
    with one bias.
    """
    width, heads = _last_size(call["qkv"]), call["num_heads"]
    yield from shapes(call, (width,), "qkv_bias")
    yield from dtypes(call, call["qkv"].dtype, "qkv_bias")
    yield "size modulo heads", width % (3 * heads) if heads > 0 else None, 0


def encoder(call: Call) -> Iterator[Sizes]:
    embed, heads = call["embed_dim"], call.get("num_heads", call.get("num_head"))
    for name in ("src", "query", "key", "value"):
        if is_tensor(call.get(name)):
            yield f"last size of {name}", _last_size(call[name]), embed
    yield "embed_dim modulo heads", embed % heads if heads and heads > 0 else None, 0
    yield from shapes(call, (3 * embed, embed), "qkv_weight")
    yield from shapes(call, (3 * embed,), "qkv_bias")
    yield from shapes(call, (embed, embed), "proj_weight")
    vectors = ("proj_bias", *(f"norm_{kind}_{n}" for kind in ("weight", "bias") for n in (1, 2)), "ffn_bias_2")
    yield from shapes(call, (embed,), *vectors)
    tensors = [name for name, value in call.items() if is_tensor(value) and name not in ("mask", "src", "query")]
    yield from dtypes(call, call["src" if "src" in call else "query"].dtype, *tensors)


def rnn(call: Call) -> Iterator[Sizes]:
    """Yield the actual and the expected sizes of one LSTM layer; the kernel supports no other recurrent cells."""
    inputs, hidden = shape_of(call["input"]), call["hidden_size"]
    places = (0, 1, 2, 3) if "weight0" in call else (1, 2, 3, 4)
    first, second, *biases = (f"weight{place}" for place in places)
    yield "mode", call["mode"], 2
    yield "dimensions of input", len(inputs), 3
    yield from shapes(call, (4 * hidden, inputs[2]), first)
    yield from shapes(call, (4 * hidden, hidden), second)
    if call["has_biases"]:
        yield from shapes(call, (4 * hidden,), *biases)
    yield from elements(call, inputs[1] * hidden, "hx_", "cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy")
    yield from shapes(call, (*inputs[:2], hidden), "output", "grad_output")
    tensors = (name for name, value in call.items() if is_tensor(value) and name != "workspace")
    yield from dtypes(call, call["input"].dtype, *tensors)
    if "workspace" in call:
        yield from dtypes(call, torch.uint8, "workspace")
        yield from shapes(call, _workspace(call), "workspace")


def _workspace(call: Call) -> tuple[int, ...]:
    """Return the shape of the workspace that the forward call of an LSTM saves for its backward; it depends
    on the CPU.
    """
    forward = torch.ops.aten.mkldnn_rnn_layer.default
    renamed = {**{f"weight{place}": f"weight{place + 1}" for place in range(4)}, "cx_": "cx_tmp"}
    call = {**call, "train": True}
    arguments = (call[renamed.get(argument.name, argument.name)] for argument in forward._schema.arguments)
    on_zeros = (torch.zeros(shape_of(value), dtype=value.dtype) if is_tensor(value) else value for value in arguments)
    # the forward saves nothing without gradients
    with torch.enable_grad():
        return shape_of(forward(*on_zeros)[3])


def pivots(call: Call) -> Iterator[Sizes]:
    shape = shape_of(call["LU_data"])
    yield from shapes(call, (*shape[:-2], min(shape[-2:])), "LU_pivots")


def solutions(call: Call) -> Iterator[Sizes]:
    shape, right = shape_of(call["LD"]), shape_of(call["B"])
    yield from shapes(call, shape[:-1], "pivots")
    yield "batch of B with that of LD", tuple(torch.broadcast_shapes(shape[:-2], right[:-2])), shape[:-2]


def diagonals(call: Call) -> Iterator[Sizes]:
    yield "shape with negative sizes", [size for size in call["shape"] if size < 0], []


def compressed_rows(call: Call) -> Iterator[Sizes]:
    yield "size that has places for all", call["size"] > 0 or call["size"] == prod(shape_of(call["self"])) == 0, True


def reduced_products(call: Call) -> Iterator[Sizes]:
    rows, inner = shape_of(call["self"])
    weight = shape_of(call["weight"])
    yield "rows of weight", weight[0], inner
    yield from shapes(call, (rows, weight[1]), "grad_out")
    # only these reductions save indices
    if call["reduce"] in ("amax", "amin"):
        yield from shapes(call, (rows, weight[1]), "arg_out")


def reach(call: Call) -> Iterator[Sizes]:
    """Yield whether a view ends below element 2**59, as it must, because torch computes its end in 64 bits."""
    last = (call.get("storage_offset") or 0) + sum(
        (size - 1) * stride for size, stride in zip(call["size"], call["stride"], strict=True) if size > 0
    )
    yield f"places up to {last}", abs(last) < 2**59, True


def dimensions(call: Call) -> Iterator[Sizes]:
    """Yield whether the dimensions of a Fourier transform exist and are distinct, as they must."""
    count = len(shape_of(call["self"]))
    yield f"dimensions from {-count} to {count - 1}", all(-count <= dim < count for dim in call["dim"]), True
    yield "different dimensions", len({dim % count for dim in call["dim"]}) if count else 0, len(call["dim"])


def half_spectrum(call: Call) -> Iterator[Sizes]:
    yield from dimensions(call)
    shape = shape_of(call["self"])
    yield "last_dim_size above 0", call["last_dim_size"] > 0, True
    if call["dim"]:
        yield "size of the last dimension", shape[call["dim"][-1]], call["last_dim_size"] // 2 + 1


def padded_rows(call: Call) -> Iterator[Sizes]:
    padded = shape_of(call["padded"])
    yield from shapes(call, (padded[0], len(padded) - 1), "cpu_nested_shape_example")


def classes(call: Call) -> Iterator[Sizes]:
    """Yield whether the input of a loss has at least one class, which it must unless the target is empty."""
    shape = shape_of(call["self"])
    yield "classes", shape[1 if len(shape) > 1 else 0] > 0 or not prod(shape_of(call["target"])), True


def noise(call: Call) -> Iterator[Sizes]:
    yield from shapes(call, shape_of(call["self"]), "noise", "grad_output")
    yield "dtype of noise", call["noise"].dtype, call["self"].dtype


def margins(call: Call) -> Iterator[Sizes]:
    shape = shape_of(call["self"])
    samples = shape[0] if len(shape) > 1 else 1
    yield "elements of target", prod(shape_of(call["target"])), samples
    yield "elements of grad_output", prod(shape_of(call["grad_output"])), samples if call["reduction"] == 0 else 1
    yield from shapes(call, shape[-1:], "weight")


def upsample(call: Call) -> Iterator[Sizes]:
    """Yield the actual and the expected sizes of an interpolation, and its scale factors if they do not match these
    sizes.
    """
    if "output_size" not in call or "input" in call:
        # this overload computes one from the other
        return
    input_size = tuple(call["input_size"]) if "input_size" in call else shape_of(call["self"])
    output_size = tuple(call["output_size"])
    yield "input", len(input_size), len(output_size) + 2
    yield from shapes(call, (*input_size[:2], *output_size), "grad_output")
    names = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}[len(output_size)]
    for name, before, after in zip(names, input_size[2:], output_size, strict=True):
        scale = call.get(name)
        if scale is not None and not (isfinite(scale) and scale > 0 and abs(before * scale - after) <= 1):
            yield name, scale, f"about {after}/{before}"


def batch_norm(call: Call) -> Iterator[Sizes]:
    shape = shape_of(call["input"])
    channels = shape[1]
    yield from elements(call, channels, "weight", "bias", "running_mean", "running_var", "mean", "invstd")
    yield from shapes(call, shape, "grad_out", "grad_output")
    trains = call.get("train", call.get("training", call.get("update", True)))
    for name in ("save_mean", "save_invstd", "save_var"):
        # an evaluation saves no statistics
        if trains or (is_tensor(call.get(name)) and prod(shape_of(call[name]))):
            yield from elements(call, channels, name)


def layer_norm(call: Call) -> Iterator[Sizes]:
    shape, normalized = shape_of(call["input"]), tuple(call["normalized_shape"])
    yield "normalized_shape", normalized, shape[len(shape) - len(normalized) :]
    yield from shapes(call, normalized, "weight", "bias")
    yield from shapes(call, shape, "grad_out")
    yield from elements(call, prod(shape[: len(shape) - len(normalized)]), "mean", "rstd")


def group_norm(call: Call) -> Iterator[Sizes]:
    batch, channels, groups = call["N"], call["C"], call["group"]
    yield "N, C and HxW", batch * channels * call["HxW"], prod(shape_of(call["input"]))
    yield "C modulo group", channels % groups if groups > 0 else None, 0
    yield from shapes(call, shape_of(call["input"]), "grad_out")
    yield from elements(call, channels, "weight", "bias")
    yield from elements(call, batch * groups, "mean", "rstd")


def group_norm_backward(call: Call) -> Iterator[Sizes]:
    """Yield the actual and the expected sizes of the backward of a group norm; some versions of torch read its
    gradients as contiguous memory.
    """
    yield from group_norm(call)
    if not _takes_any_strides():
        yield from own_memory("grad_out", "input", "weight", "mean", "rstd")(call)


class _Gradients(TorchDispatchMode):
    """A dispatch mode that sets `any_strides` if the backward of a group norm receives a non-contiguous gradient."""

    any_strides: bool = False

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function._schema.name == "aten::native_group_norm_backward":
            self.any_strides |= not args[0].is_contiguous()
        return function(*args, **(kwargs or {}))


@cache
def _takes_any_strides() -> bool:
    """Return True if the operator for the backward of a group norm accepts non-contiguous gradients, as in
    torch 2.15.
    """
    # in a new thread, because the caller may be in a dispatch mode, in which nothing has gradients
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_sees_any_strides).result()


def _sees_any_strides() -> bool:
    image = torch.zeros(1, 2, 3, requires_grad=True)
    gradients = _Gradients()
    with gradients:
        torch.nn.functional.group_norm(image, 1).sum().backward()
    return gradients.any_strides


def weight_norm(call: Call) -> Iterator[Sizes]:
    shape = shape_of(call["v"] if "v" in call else call["saved_v"])
    yield from shapes(call, shape, "grad_w")
    yield from elements(call, shape[call.get("dim", 0)], "g", "saved_g", "saved_norms")


def quantized_batch_norm(call: Call) -> Iterator[Sizes]:
    yield from elements(call, shape_of(call["qx"])[1], "weight", "bias", "mean", "var")
