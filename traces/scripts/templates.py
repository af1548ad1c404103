"""Source code of the helper functions that scripts contain."""

DATA = '''
def data(text, dtype, shape):
    """Return the values that were drawn when this file was made; the text holds them deflated, in base64."""
    content = bytearray(zlib.decompress(base64.b64decode(text)))
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(shape)
'''
SAMPLED = '''
def sampled(text, dtype, sample_shape, shape):
    """Return values whose rows are random copies of the rows that were drawn when this file was made."""
    sample = data(text, dtype, sample_shape)
    count = math.prod(shape) // max(1, math.prod(sample_shape[1:]))
    return sample[torch.randint(len(sample), (count,))].reshape(shape)
'''
MIXED = '''
def mixed(values, counts):
    """Return values of which some, at random positions, are replaced; counts has (new value, number)."""
    flat = values.reshape(-1).clone()
    indices = torch.randperm(flat.numel())
    for value, count in counts:
        flat[indices[:count]] = value
        indices = indices[count:]
    return flat.reshape(values.shape)
'''
BY_QUANTILES = '''
def by_quantiles(shape, dtype, probabilities, quantiles):
    """Return random values whose distribution function is linear between the quantiles."""
    knots, levels = (torch.tensor(numbers, dtype=torch.float64) for numbers in (probabilities, quantiles))
    at = torch.rand(shape, dtype=torch.float64)
    cell = torch.bucketize(at, knots[1:-1], right=True)
    part = (at - knots[cell]) / (knots[cell + 1] - knots[cell])
    return (levels[cell] * (1 - part) + levels[cell + 1] * part).to(dtype)
'''
WHOLE_NUMBERS = '''
def whole_numbers(shape, dtype, frequent, low, high):
    """Return the frequent values, (value, count), and integers from low to high, in random order."""
    count = math.prod(shape)
    values = torch.tensor([value for value, _ in frequent], dtype=torch.int64)
    values = values.repeat_interleave(torch.tensor([times for _, times in frequent], dtype=torch.int64))[:count]
    values = torch.cat([values, torch.randint(low, high + 1, (count - len(values),))])
    return values[torch.randperm(count)].to(dtype).reshape(shape)
'''
VIEW = '''
def view(memory, dtype, offset, shape, stride):
    """Return a tensor with this offset, shape and strides in a storage."""
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, offset, shape, stride)
'''
FILL = '''
def fill(tensor, values):
    """Copy values into a tensor; elements that share memory in a dimension of stride 0 are written once."""
    shape = [1 if step == 0 else size for size, step in zip(tensor.shape, tensor.stride())]
    tensor.as_strided(shape, tensor.stride()).copy_(values[tuple(map(slice, shape))])
'''
# source code of the helper functions, by name
FUNCTIONS = {
    "data": DATA,
    "sampled": DATA + "\n" + SAMPLED,
    "mixed": MIXED,
    "by_quantiles": BY_QUANTILES,
    "whole_numbers": WHOLE_NUMBERS,
    "view": VIEW,
    "fill": FILL,
}

MAIN = '''
def tensors(tree):
    """Return all tensors in lists and tuples."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [tensor for item in tree for tensor in tensors(item)] if isinstance(tree, (list, tuple)) else []


def prepared(mode):
    """Return the function that a mode runs: eager, compile, compile-dynamic or compile:BACKEND, another implementation
    as candidate:FILE.py:FUNCTION, or the operator in bfloat16 or float16."""
    name, _, backend = mode.partition(":")
    if name == "eager":
        return OPERATOR
    if name == "candidate":
        source, _, function = backend.rpartition(":")
        return runpy.run_path(source)[function]
    if name in ("bfloat16", "float16"):
        return in_dtype(getattr(torch, name))
    return torch.compile(OPERATOR, backend=backend or "inductor", dynamic=name == "compile-dynamic")


def cast_all(tree, dtype):
    """Return a copy in which floating-point tensors and dtypes are of another dtype."""
    if isinstance(tree, (list, tuple)):
        return type(tree)([cast_all(item, dtype) for item in tree])
    if isinstance(tree, dict):
        return {name: cast_all(item, dtype) for name, item in tree.items()}
    if isinstance(tree, torch.dtype):
        return dtype if tree.is_floating_point else tree
    is_cast = isinstance(tree, torch.Tensor) and tree.is_floating_point()
    return tree.to(dtype) if is_cast else tree


def in_dtype(dtype):
    """Return the operator computed in another dtype, with results in the dtype of the first floating-point argument."""

    def run(*positional, **named):
        given = [tensor.dtype for tensor in tensors([*positional, *named.values()]) if tensor.is_floating_point()]
        result = OPERATOR(*cast_all(positional, dtype), **cast_all(named, dtype))
        return cast_all(tensors(result), given[0]) if given else result

    return run


def compare(results, expected):
    """Print how far results are from those of eager mode, and return whether all are close."""
    is_close = len(results) == len(expected)
    for index, (one, other) in enumerate(zip(results, expected)):
        try:
            torch.testing.assert_close(one, other, equal_nan=True)
        except AssertionError as error:
            is_close = False
            print(f"result {index} differs from eager: {' '.join(str(error).split())}")
    return is_close


def timed(program, device, positional, named):
    """Return the time of one call, in us."""
    if torch.device(device).type != "cpu":
        torch.get_device_module(device).synchronize()
    begin = time.perf_counter_ns()
    program(*positional, **named)
    if torch.device(device).type != "cpu":
        torch.get_device_module(device).synchronize()
    return (time.perf_counter_ns() - begin) / 1e3


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=RECORDED_DEVICE)
    parser.add_argument("--threads", type=int, default=RECORDED_THREADS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--mode", default=MODE, help="eager, compile, compile-dynamic, compile:BACKEND, "
                        "candidate:FILE.py:FUNCTION, bfloat16 or float16")
    args = parser.parse_args()
    if torch.device(args.device).type != "cpu" and not torch.get_device_module(args.device).is_available():
        raise SystemExit(f"{args.device} is not available here: choose another with --device, such as cpu")
    if args.threads:
        torch.set_num_threads(args.threads)
    inputs = make_inputs(args.device)
    torch.manual_seed(0)
    expected = tensors(OPERATOR(*inputs[0], **inputs[1]))
    results = [(tuple(tensor.shape), tensor.dtype) for tensor in expected]
    for shape, dtype in results:
        print(f"result {str(dtype).removeprefix('torch.')}{list(shape)}")
    if RESULTS is not None:
        assert results == RESULTS, f"the trace has {RESULTS}"
    is_close = True
    for mode in dict.fromkeys(["eager", args.mode]):
        program = prepared(mode)
        if mode != "eager":
            inputs = make_inputs(args.device)
            torch.manual_seed(0)
            is_close = compare(tensors(program(*inputs[0], **inputs[1])), expected)
        times = []
        for _ in range(args.repeats):
            if MUTATES:
                inputs = make_inputs(args.device)
            times.append(timed(program, args.device, *inputs))
        if times:
            fastest = f"fastest {min(times):,.1f} us, of {len(times)} calls"
            print(f"{mode}: median {statistics.median(times):,.1f} us, {fastest}")
    if not is_close:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
'''

OBJECTS = '''
SHARED = {}


def keep(number, value):
    """Return a value that occurs several times, and remember it."""
    SHARED[number] = value
    return value


def make_object(cls, fields, content=None):
    """Return an object of a class, created without running the constructor."""
    if isinstance(content, torch.Tensor):
        made = torch.Tensor._make_subclass(cls, content.detach(), content.requires_grad)
    elif isinstance(content, (list, dict, set)):
        made = cls.__new__(cls)
        (type(content).extend if isinstance(content, list) else type(content).update)(made, content)
    else:
        made = object.__new__(cls) if content is None else type(content).__new__(cls, content)
    if fields:
        vars(made).update(fields)
    return made


def make_module(cls, parameters, buffers, modules, fields):
    """Return a module, created without running the constructor."""
    made = object.__new__(cls)
    if isinstance(made, torch.nn.Module):
        torch.nn.Module.__init__(made)
        made._parameters.update(parameters)
        made._buffers.update(buffers)
        made._modules.update(modules)
    else:
        fields = {**parameters, **buffers, **modules, **fields}
    vars(made).update(fields)
    return made
'''

# names that a script defines in addition to `FUNCTIONS`
RESERVED = (
    *("OPERATOR", "MODE", "MUTATES", "RECORDED_DEVICE", "RECORDED_THREADS", "RESULTS", "SHARED"),
    *("keep", "make_object", "make_module", "make_inputs", "tensors", "prepared", "compare", "timed", "main"),
    *("cast_all", "in_dtype"),
)
