"""One call of a trace as a Python script that runs with torch alone."""

from __future__ import annotations

import keyword
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from math import prod
from typing import Any

import torch

from opgrip.errors import UserError
from opgrip.traces.formats.operator_schemas import OPERATOR_NAME
from opgrip.traces.schema.arguments import DTYPES, TensorSpec, leaves, tensors
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.schema.tensor_specs import STORAGE
from opgrip.traces.scripts.literals import FEW, Literals, ValueSource, comment, plain, plain_tuple, sizes
from opgrip.traces.table.accelerators import device_of
from opgrip.traces.values import Drawable

DATA = '''
def data(text, dtype, shape):
    """Values that were drawn when this file was made: deflated, in base64."""
    content = bytearray(zlib.decompress(base64.b64decode(text)))
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(shape)
'''
SAMPLED = '''
def sampled(text, dtype, sample_shape, shape):
    """Values whose rows are taken at random from those that were drawn when this file was made."""
    sample = data(text, dtype, sample_shape)
    count = math.prod(shape) // max(1, math.prod(sample_shape[1:]))
    return sample[torch.randint(len(sample), (count,))].reshape(shape)
'''
MIXED = '''
def mixed(values, counts):
    """The values, with others in random places: so many of each."""
    flat = values.reshape(-1).clone()
    places = torch.randperm(flat.numel())
    for value, count in counts:
        flat[places[:count]] = value
        places = places[count:]
    return flat.reshape(values.shape)
'''
BY_QUANTILES = '''
def by_quantiles(shape, dtype, probabilities, quantiles):
    """Random values whose distribution function goes straight from each quantile to the next."""
    knots, levels = (torch.tensor(numbers, dtype=torch.float64) for numbers in (probabilities, quantiles))
    at = torch.rand(shape, dtype=torch.float64)
    cell = torch.bucketize(at, knots[1:-1], right=True)
    part = (at - knots[cell]) / (knots[cell + 1] - knots[cell])
    return (levels[cell] * (1 - part) + levels[cell + 1] * part).to(dtype)
'''
WHOLE_NUMBERS = '''
def whole_numbers(shape, dtype, frequent, low, high):
    """Frequent values with their counts, and integers from low to high, in random order."""
    count = math.prod(shape)
    values = torch.tensor([value for value, _ in frequent], dtype=torch.int64)
    values = values.repeat_interleave(torch.tensor([times for _, times in frequent], dtype=torch.int64))[:count]
    values = torch.cat([values, torch.randint(low, high + 1, (count - len(values),))])
    return values[torch.randperm(count)].to(dtype).reshape(shape)
'''
VIEW = '''
def view(memory, dtype, offset, shape, stride):
    """A tensor of that layout in some memory."""
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, offset, shape, stride)
'''
FILL = '''
def fill(tensor, values):
    """Put values into a tensor; into elements that are one in memory, once."""
    shape = [1 if step == 0 else size for size, step in zip(tensor.shape, tensor.stride())]
    tensor.as_strided(shape, tensor.stride()).copy_(values[tuple(map(slice, shape))])
'''
FUNCTIONS = {
    "data": DATA,
    "sampled": DATA + "\n" + SAMPLED,
    "mixed": MIXED,
    "by_quantiles": BY_QUANTILES,
    "whole_numbers": WHOLE_NUMBERS,
    "view": VIEW,
    "fill": FILL,
}
"""Sources of the functions that scripts define for themselves, by name."""

MAIN = '''
def tensors(tree):
    """All tensors in lists and tuples."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [tensor for item in tree for tensor in tensors(item)] if isinstance(tree, (list, tuple)) else []


def timed(device, positional, named):
    """The time of one call, in us."""
    if torch.device(device).type != "cpu":
        torch.get_device_module(device).synchronize()
    begin = time.perf_counter_ns()
    OPERATOR(*positional, **named)
    if torch.device(device).type != "cpu":
        torch.get_device_module(device).synchronize()
    return (time.perf_counter_ns() - begin) / 1e3


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=RECORDED_DEVICE)
    parser.add_argument("--threads", type=int, default=RECORDED_THREADS)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    inputs = make_inputs(args.device)
    results = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors(OPERATOR(*inputs[0], **inputs[1]))]
    for shape, dtype in results:
        print(f"result {str(dtype).removeprefix('torch.')}{list(shape)}")
    if RESULTS is not None:
        assert results == RESULTS, f"the trace has {RESULTS}"
    times = []
    for _ in range(args.repeats):
        if MUTATES:
            inputs = make_inputs(args.device)
        times.append(timed(args.device, *inputs))
    if times:
        print(f"median {statistics.median(times):,.1f} us, fastest {min(times):,.1f} us, of {len(times)} calls")


if __name__ == "__main__":
    main()
'''


ADDRESSES = 1 << 62


def tensor_lines(
    specs: Sequence[TensorSpec], values: Mapping[int, Drawable], literals: Literals, source: ValueSource
) -> Iterator[str]:
    """Yield the statements that make the tensors `x0`, `x1`, ... in order.

    Raise `UserError` for a tensor that no script can make.
    """
    for spec in specs:
        _check(spec)
    fills: list[tuple[int, str]] = []
    memory: dict[int, str] = {}
    for place, spec in enumerate(specs):
        model = None if spec.values is None else values.get(spec.values)
        name, device = f"x{place}", literals.device(spec.device)
        if spec.storage is None and spec.offset == 0 and _is_plain(spec):
            moved = "" if device == '"cpu"' else f".to({device})"
            yield f"{name} = {source.of(model, spec.shape, spec.dtype)}{moved}"
            continue
        number = spec.storage if spec.storage is not None else -1 - place
        if number not in memory:
            memory[number] = f"memory{len(memory)}"
            alike = [item for item in specs if item.storage == spec.storage] if spec.storage is not None else [spec]
            size = max(item.extent for item in alike)
            yield f"{memory[number]} = torch.zeros({size}, dtype=torch.uint8, device={device}).untyped_storage()"
        source.helpers.add("view")
        yield f"{name} = {_view(memory[number], spec, spec.shape, spec.stride or ())}"
        if prod(spec.shape):
            fills.append((place, memory[number]))
    # of tensors in the same memory, the smaller one has more specific values
    for place, name in sorted(fills, key=lambda item: -prod(specs[item[0]].shape)):
        spec = specs[place]
        source.helpers.add("fill")
        yield _fill(place, name, spec, None if spec.values is None else values.get(spec.values), source)
    for place, spec in enumerate(specs):
        yield from _bits(f"x{place}", spec)


def _check(spec: TensorSpec) -> None:
    name = str(spec.layout).removeprefix("torch.")
    is_plain = spec.made_of is None and spec.layout is torch.strided and spec.stride is not None
    if not is_plain or spec.cls not in (None, STORAGE):
        kind = spec.cls if spec.cls is not None else "quantized" if spec.layout is torch.strided else name
        raise UserError(f"unsupported tensor: {str(kind)[:60]!r}", "replay it with opreplay")
    if spec.device == "meta":
        raise UserError("a tensor is on the meta device", "choose another case")
    if spec.extent >= ADDRESSES or prod(spec.shape) >= ADDRESSES:
        raise UserError("a tensor is larger than the address space", "choose another case")
    if spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype in _WHOLE:
        return
    raise UserError(f"unsupported dtype: {str(spec.dtype).removeprefix('torch.')}", "replay it with opreplay")


_WHOLE = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
)


def _is_plain(spec: TensorSpec) -> bool:
    """Return True if the elements lie one after the other."""
    step = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride or ()), strict=True):
        # torch does not look at the stride of a single element, and neither does it keep it
        if stride != step:
            return False
        step *= max(size, 1)
    return True


def _view(memory: str, spec: TensorSpec, shape: Sequence[int], stride: Sequence[int]) -> str:
    return f"view({memory}, {spec.dtype}, {spec.offset}, {sizes(shape)}, {sizes(stride)})"


def _fill(place: int, memory: str, spec: TensorSpec, model: Drawable | None, source: ValueSource) -> str:
    stride = spec.stride or ()
    once = tuple(1 if step == 0 else size for size, step in zip(spec.shape, stride, strict=True))
    if prod(spec.shape) <= FEW:
        # recorded one by one: for each element, not for each place in memory
        return f"fill(x{place}, {source.of(model, spec.shape, spec.dtype)})"
    if _has_windows(once, stride):
        length = 1 + sum((size - 1) * step for size, step in zip(once, stride, strict=True))
        flat = _view(memory, spec, (length,), (1,))
        return f"fill({flat}, {source.of(model, (length,), spec.dtype)})"
    return f"fill(x{place}, {source.of(model, once, spec.dtype)})"


def _has_windows(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if elements may overlap by the strides."""
    reach = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False


def _bits(name: str, spec: TensorSpec) -> Iterator[str]:
    if spec.conj:
        yield f"{name} = {name}.conj()"
    if spec.neg:
        yield f"{name} = torch._neg_view({name})"
    if spec.requires_grad:
        yield f"{name}.requires_grad_()"


STANDARD = ("argparse", "base64", "math", "statistics", "time", "zlib")
MOST_THREADS = 1 << 10


def script_of(
    signature: Signature, values: Mapping[int, Drawable], settings: Mapping[str, Any], facts: Sequence[str] = ()
) -> str:
    """Return a script that makes a call's arguments, calls the operator, checks its results' shapes and times it.

    values : the models that the signature's tensors refer to
    settings : of torch, that the call ran under
    facts : lines to stand at the top as comments, whatever text they hold

    Raise `UserError` for a call that torch alone cannot make.
    """
    operator = _operator(signature)
    dynamic = torch.Tag.dynamic_output_shape in operator.tags
    device = device_of(signature)
    specs = list(tensors([signature.args, signature.kwargs]))
    names = iter(range(len(specs)))
    literals = Literals(lambda spec: f"x{next(names)}{'.untyped_storage()' if spec.cls == STORAGE else ''}", device)
    source = ValueSource(_deciding(specs) if dynamic else ())
    lines = list(tensor_lines(specs, values, literals, source))
    positional = plain_tuple([literals.of(item) for item in signature.args])
    named = _named(signature.kwargs, literals)
    results = _results(signature) if source.is_exact or not dynamic else None
    parts = [
        _head(signature, facts),
        f"OPERATOR = {_operator_source(signature.op)}",
        f"MUTATES = {operator._schema.is_mutable!r}",
        f"RECORDED_DEVICE = {device!r}",
        f"RECORDED_THREADS = {_threads(settings)}",
        f"RESULTS = {results}",
        *_settings(settings),
        *("\n" + FUNCTIONS[name].rstrip() for name in _ordered(source.helpers)),
        "",
        "",
        "def make_inputs(device):",
        '    """Fresh arguments, by position and by name."""',
        "    torch.manual_seed(0)",
        *(f"    {line}" for line in lines),
        f"    return {positional}, {named}",
        "",
        "",
    ]
    body = "\n".join(parts) + MAIN.lstrip()
    imports = [f"import {name}" for name in STANDARD if f"{name}." in body]
    return body.replace("IMPORTS\n", "\n".join([*imports, "", "import torch", "", ""]), 1)


def _deciding(specs: Sequence[TensorSpec]) -> set[torch.dtype]:
    """Return dtypes of the tensors whose values decide the result's shape: of indices and masks if there are any."""
    dtypes = {spec.dtype for spec in specs}
    return {item for item in dtypes if not (item.is_floating_point or item.is_complex)} or dtypes


def _head(signature: Signature, facts: Sequence[str]) -> str:
    """Return the script's docstring and comments."""
    lines = [
        f'"""A call of {signature.op} as a program made it. This script only needs torch."""',
        "",
        *(f"# {comment(fact)}" for fact in facts),
        f"# made by opgrip {metadata.version('opgrip')}",
        "",
        "IMPORTS",
    ]
    return "\n".join(lines)


def _operator(signature: Signature) -> Any:
    """Return the registered overload that a signature names, or raise `UserError`."""
    if signature.kind != OPERATOR:
        raise UserError(
            f"{signature.op} is not an operator of torch but of kind {signature.kind}", "replay it with opreplay"
        )
    match = OPERATOR_NAME.fullmatch(signature.op)
    parts = signature.op.split(".")
    if match is None or len(parts) != 3 or not signature.op.isascii():
        raise UserError(f"{signature.op[:80]!r} is not the name of an operator", "choose another case")
    try:
        operator = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except (AttributeError, RuntimeError):
        operator = None
    if not isinstance(operator, torch._ops.OpOverload):
        raise UserError(f"{signature.op} is not registered in torch {torch.__version__}", "choose another case")
    return operator


def _operator_source(op: str) -> str:
    source = "torch.ops"
    for part in op.split("."):
        source = f"getattr({source}, {part!r})" if keyword.iskeyword(part) else f"{source}.{part}"
    return source


def _named(kwargs: Mapping[str, Any], literals: Literals) -> str:
    return f"{{{', '.join(f'{name!a}: {literals.of(value)}' for name, value in kwargs.items())}}}"


def _results(signature: Signature) -> str | None:
    """Return the source of the results' shapes and dtypes, None if they are unknown."""
    outputs = list(leaves(signature.outputs))
    specs = [leaf for leaf in outputs if isinstance(leaf, TensorSpec)]
    known = all(leaf is None or isinstance(leaf, TensorSpec | bool | int | float | complex) for leaf in outputs)
    plain_layout = all(spec.layout is torch.strided and spec.made_of is None for spec in specs)
    if signature.raised is not None or not known or not plain_layout:
        return None
    return f"[{', '.join(f'({sizes(spec.shape)}, {spec.dtype})' for spec in specs)}]"


def _threads(settings: Mapping[str, Any]) -> int:
    threads = settings.get("threads")
    return threads if type(threads) is int and 0 < threads <= MOST_THREADS else 0


def _settings(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield statements for the settings that change what a call computes."""
    dtype = DTYPES.get(str(settings.get("default_dtype")))
    if dtype is not None and dtype.is_floating_point and dtype != torch.float32:
        yield f"torch.set_default_dtype({plain(dtype)})"
    if settings.get("deterministic") is True:
        yield f"torch.use_deterministic_algorithms(True, warn_only={settings.get('deterministic_warn_only') is True})"
    if settings.get("matmul_precision") in ("high", "medium"):
        yield f"torch.set_float32_matmul_precision({settings['matmul_precision']!r})"


def _ordered(helpers: set[str]) -> list[str]:
    # sampled has data with it
    return [name for name in FUNCTIONS if name in helpers and not (name == "data" and "sampled" in helpers)]
